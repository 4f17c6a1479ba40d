"""`zprof top`: following files that grow, and the view of devices, runs and units."""
