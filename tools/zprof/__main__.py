"""Owns ``python -m zprof``, for launchers that start modules: ``torchrun --nproc_per_node 2 -m zprof run train.py``.

Python runs it. It does what the console script does, and nothing else.
"""

from zprof.cli import main

if __name__ == "__main__":
    main(prog_name="zprof")
