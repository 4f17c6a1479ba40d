"""`zprof top`: the view of devices, runs and units."""
