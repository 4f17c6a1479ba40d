"""The checks of `zprof doctor`."""
