"""Whole libraries against plain PyTorch: ``python -m tests.architectures --world 2 --modes eager recomputed``.

A developer calls it; what it prints is the table of docs/explanation/architectures.md.  It goes on where an earlier call
with the same file of results was stopped.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

from tests.architectures.sweep import read, sweep, table
from tests.architectures.train import MODES
from tests.support.paths import SEARCH_PATH

LIBRARIES = ("transformers", "diffusers", "geometric")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("--world", type=int, default=1, help="ranks (1)")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="what to attach with (all)")
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--types", nargs="+", default=[], help='such as "transformers/bert" (all)')
    parser.add_argument("--results", type=Path, default=Path("architectures.jsonl"), help="the file of results (%(default)s)")
    parser.add_argument("--share", default="1/1", help='every n-th type from the k-th, as "k/n", for several calls at once')
    parser.add_argument("--again", action="store_true", help="train those again that were not equal")
    parser.add_argument("--only-table", action="store_true", help="print the file of results, train nothing")
    arguments = parser.parse_args()
    if arguments.only_table:
        print(table(read(arguments.results)))
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PYTHONPATH"] = SEARCH_PATH
    names = arguments.types or [
        f"{library}/{kind}"
        for library in arguments.libraries
        for kind in importlib.import_module(f"tests.architectures.of_{library}").types()
    ]
    first, step = map(int, arguments.share.split("/"))
    print(table(sweep(names[first - 1 :: step], arguments.world, arguments.modes, arguments.results, arguments.again)))


if __name__ == "__main__":
    main()
