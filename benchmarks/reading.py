"""What it costs to read a large trace: each command beside the decoding of the same rows, and the memory it takes.

    python benchmarks/reading.py [--rows 10_000_000] [--rounds 3] [--commands report,check,timeline] [--level alloc]
                                 [--trace run.zprof] [--json out.json]

The trace is that of a small GPT under zhooks, recorded for a few steps whose rows are then written again and again, later each
time. Every round runs each command in a process of its own, beside one that only decodes the rows; a command's time is divided
by the decoding's of the same round, and the table has the median. Times are of the processor, which other processes disturb
least; imports are not timed. Memory is the process's peak, imports included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zprof.rows import Row, RowKind
from zprof.trace.columns import Rows
from zprof.trace.writer import Writer

if TYPE_CHECKING:
    from zprof.recording.recorder import Level

MIB = 1 << 20
#: Recorded, the first three of which are not repeated.
STEPS = 12


def main() -> None:
    chosen = arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = chosen.trace or Path(folder) / "run.0.zprof"
        if not path.exists():
            write(path, chosen.rows, chosen.level)
        rounds = [
            {name: _apart(name, path) for name in ("decode", *chosen.commands.split(","))} for _ in range(chosen.rounds)
        ]
    print(f"{chosen.rows:,} rows, level {chosen.level}, {chosen.rounds} rounds\n")
    print(f"{'':14}{'seconds':>10}{'x decode':>10}{'peak RSS':>12}")
    for name in rounds[0]:
        seconds = statistics.median(each[name][0] for each in rounds)
        ratio = statistics.median(each[name][0] / each["decode"][0] for each in rounds)
        print(f"{name:14}{seconds:10.2f}{ratio:10.2f}{max(each[name][1] for each in rounds) / MIB:8.0f} MiB")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rounds))


def write(path: Path, count: int, level: Level) -> None:
    """A trace of at least so many rows."""
    from zprof.trace.reader import Trace

    _apart("record", path.with_name(f"recorded.{level}.zprof"), level)
    recorded = Trace.open(path.with_name(f"recorded.{level}.zprof"))
    rows = [row for chunk in recorded.chunks() for row in _named(chunk, recorded.strings)]
    ends = [at for at, row in enumerate(rows) if row.what == "step" and row.kind == RowKind.END]
    # From the end of a step to the end of a later one, which leaves what is held as it was.
    before, again = rows[: ends[2] + 1], rows[ends[2] + 1 : ends[-1] + 1]
    period_ns = rows[ends[-1]].time_ns - rows[ends[2]].time_ns
    writer = Writer(path, recorded.header, limit=1 << 40)
    for note in recorded.notes():
        if note.name != "end":
            writer.note(*note)
    writer.rows(before)
    for turn in range(-(-(count - len(before)) // len(again))):
        writer.rows([row._replace(time_ns=row.time_ns + turn * period_ns) for row in again])
    writer.close()
    os.unlink(recorded.path)


def _named(rows: Rows, strings: list[str]) -> Iterator[Row]:
    what, key = ([strings[place] for place in column.tolist()] for column in (rows.what, rows.key))
    yield from map(Row, rows.kind.tolist(), what, key, *(
        column.tolist() for column in (rows.nbytes, rows.time_ns, rows.thread, rows.ident)
    ))  # fmt: skip


def _train(path: Path, level: Level) -> None:
    """Record a small GPT."""
    import torch

    import zhooks
    from workload import SHAPES, build
    from zprof.recording.recorder import Recorder

    torch.set_num_threads(1)
    shape = replace(SHAPES["tiny"], batch=2, length=64)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    with Recorder(path, level=level, force=True).listen():
        model = build(shape)
        zhooks.attach(model, policy={"stage": 3})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
            optimizer.step()
            optimizer.zero_grad()


# Each in a process of its own.


def _apart(name: str, path: Path, level: Level = "alloc") -> tuple[float, int]:
    """Seconds and bytes of one command."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_timed, args=(name, path, level, there))
    process.start()
    there.close()
    found: tuple[float, int] = here.recv()
    process.join()
    return found


def _timed(name: str, path: Path, level: Level, answer: Any) -> None:
    do = (lambda: _train(path, level)) if name == "record" else _prepared(name, path)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        begin = time.process_time()
        do()
        took = time.process_time() - begin
    answer.send((took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10))


def _prepared(name: str, path: Path) -> Callable[[], object]:
    """What is timed, its imports done."""
    from importlib import import_module

    from zprof.cli import main as zprof
    from zprof.trace.reader import Trace

    if name == "decode":
        return lambda: sum(len(rows) for rows in Trace.open(path).chunks())
    command, *words = name.split(":")
    for module in _NEEDED.get(command, ()):
        import_module(module)
    out = [] if command not in ("timeline", "flamegraph", "export") else ["-o", f"{path}.{command}", "-f"]
    return lambda: zprof([command, str(path), *words, *out], standalone_mode=False)


_NEEDED = {
    "report": ("zprof.show.report.findings", "zprof.show.report.text", "offload.hardware", "offload.policy"),
    "timeline": ("zprof.show.pages.timeline", "plotly.offline"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--commands",
        default="report,check",
        help="separated by commas; what follows a colon is an argument: export:--format:perfetto",
    )
    parser.add_argument("--level", choices=("events", "alloc"), default="alloc")
    parser.add_argument("--trace", type=Path, help="read this one, which is written first where it is not there")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
