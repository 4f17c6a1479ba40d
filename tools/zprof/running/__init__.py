"""`zprof run`: the script in its process, the one that watches over it, the live view, and notebooks."""
