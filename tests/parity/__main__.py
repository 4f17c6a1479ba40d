"""One cell of the parity matrix alone: ``python -m tests.parity NAME`` prints its losses beside the oracle's and the
worst tensors.

A developer calls it with a name that a failed test printed; ``--here`` runs a world of one in this process, where a
debugger works. It never decides whether the cell passes.
"""

from __future__ import annotations

import argparse
import json

import torch

from tests.parity import oracle, run
from tests.parity.cells import Cell
from tests.parity.closeness import EXACT, differences, tolerance_of
from tests.support.ranks import Pool


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("name", help=f"such as {Cell().name}")
    parser.add_argument("--here", action="store_true", help="run in this process; the cell's world must be 1")
    arguments = parser.parse_args()
    cell = Cell.parse(arguments.name)
    torch.set_num_threads(1)
    print(json.dumps(cell.policy()), tolerance_of(cell), sep="\n")
    expected = oracle.train(cell)
    if arguments.here:
        assert cell.world == 1, f"--here: expected a world of 1, found {cell.world}"
        found = run.gather([run.train(cell.name)])
    else:
        pool = Pool(cell.world)
        try:
            found = run.gather(pool.run(run.JOB, name=cell.name))
        finally:
            pool.close()
    for step, (row, wanted) in enumerate(zip(found.losses, expected.losses, strict=True)):
        print(f"micro step {step}: found {row}, expected {wanted}")
    print(f"norms: found {found.norms}, expected {expected.norms}")
    print("not bit-equal:", *(differences(found, expected, EXACT) or ["nothing"]), sep="\n  ")
    print("out of tolerance:", *(differences(found, expected, tolerance_of(cell)) or ["nothing"]), sep="\n  ")


if __name__ == "__main__":
    main()
