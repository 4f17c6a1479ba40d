"""What `zprof attach` and `zprof hang` print."""
