"""What it costs to be recorded: one GPT trains in turns that are recorded at each level, and not recorded.

    python benchmarks/recording.py [--shape small] [--levels events,alloc] [--rounds 15] [--steps 8] [--json out.json]
    python benchmarks/recording.py --levels torch.profiler,ops [--plain]
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/recording.py

Every round has one turn of each kind, in an order that turns by one place; a turn's steps are timed one by one and its
median is divided by the unrecorded turn's of the same round. The table has the median of these ratios, their quarter
points, and what the recording left: rows a step, bytes a row. It never compares two runs; under torchrun rank 0 prints.

"torch.profiler" is no level: the turn's steps run under a session of it with the same activities. At "ops" all steps of a turn
but the first lie in a window; the last lines set both side by side in each round, and what beginning and ending a window took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import zhooks
from workload import SHAPES, build
from zprof.recording.recorder import Recorder
from zprof.trace.reader import Trace

WARMUP = 3
TORCHS = "torch.profiler"


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(chosen.threads)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    shape = replace(SHAPES[chosen.shape], batch=chosen.batch, length=chosen.length)
    model = build(shape)
    attachment = None if chosen.plain else zhooks.attach(model, policy={"stage": chosen.stage})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1), generator=torch.Generator().manual_seed(1))
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def step() -> float:
        begin = time.perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    for _ in range(WARMUP):
        step()
    kinds = ["off", *chosen.levels.split(",")]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    left: dict[str, dict[str, float]] = {}
    ends: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(chosen.rounds):
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                path = Path(folder) / f"{kind}-{turn}-{{rank}}.zprof"
                recorder = None if kind in ("off", TORCHS) else recording(kind, path, chosen)
                session = profile(activities=[ProfilerActivity.CPU]) if kind == TORCHS else None
                # The first opens the window, and its end is in none of the others.
                step()
                if session is not None:
                    session.start()
                    step()
                seconds[kind].append(statistics.median(step() for _ in range(chosen.steps)))
                begin = time.perf_counter()
                if session is not None:
                    session.stop()
                    session.events()
                    ends[kind].append(time.perf_counter() - begin)
                if recorder is not None:
                    recorder.close()
                    left[kind] = weigh(recorder.path, chosen.steps + 1)
                    if kind == "ops":
                        ends[kind].append(pause(recorder.path))
    if not dist.is_initialized() or dist.get_rank() == 0:
        report(seconds, left)
        if TORCHS in seconds and "ops" in seconds:
            against(seconds, ends)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps({"seconds": seconds, "left": left}))
    if attachment is not None:
        attachment.detach()
    if dist.is_initialized():
        dist.destroy_process_group()


def recording(kind: str, path: Path, chosen: argparse.Namespace) -> Recorder:
    steps = f"1:{chosen.steps + 2}" if kind == "ops" else None
    return Recorder(path, level=kind, interval_s=chosen.interval, ops_steps=steps).listen()  # type: ignore[arg-type]


def pause(path: Path) -> float:
    """Seconds that ending a window took: the events read, joined and written."""
    [body] = [note.body for note in Trace.open(path).notes("operators") if "pauses" in note.body]
    begin, end = body["pauses"][1]
    return float(end - begin) / 1e9


def against(seconds: dict[str, list[float]], ends: dict[str, list[float]]) -> None:
    ratios = [mine / theirs for mine, theirs in zip(seconds["ops"], seconds[TORCHS], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    print(f"a step at ops in {middle:.3f} of torch.profiler's time ({low:.3f}-{high:.3f})")
    took = [mine / theirs for mine, theirs in zip(ends["ops"], ends[TORCHS], strict=True)]
    ended = statistics.median(ends["ops"])
    print(f"ending: {ended:.3f} s, {statistics.median(took):.2f} of stop() and events() of torch.profiler")


def weigh(path: Path, steps: int) -> dict[str, float]:
    """Rows a step and bytes a row of one turn's trace."""
    trace = Trace.open(path)
    return {"rows a step": trace.count / steps, "bytes a row": path.stat().st_size / max(1, trace.count)}


def report(seconds: dict[str, list[float]], left: dict[str, dict[str, float]]) -> None:
    print(f"{'':15}{'step ms':>10}{'x off':>9}{'quarters':>16}{'rows/step':>11}{'bytes/row':>11}")
    for kind, mine in seconds.items():
        ratios = [one / base for one, base in zip(mine, seconds["off"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
        found: dict[str, Any] = left.get(kind, {})
        more = f"{found['rows a step']:11.0f}{found['bytes a row']:11.1f}" if found else ""
        spread = f"{low:.3f}-{high:.3f}"
        print(f"{kind:15}{1e3 * statistics.median(mine):10.1f}{statistics.median(ratios):9.3f}{spread:>16}{more}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--levels", default="events,alloc", help="of auto, events, alloc, stack, ops and torch.profiler")
    parser.add_argument("--plain", action="store_true", help="without zhooks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between samples")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
