"""The tests of zhooks, offload and zprof."""
