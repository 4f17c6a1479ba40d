"""The command line beside zhooks: it checks policies, and will read traces and plan runs.

Users call it as ``zprof``. It depends on `offload` alone and never imports torch or the runtime at start.
"""
