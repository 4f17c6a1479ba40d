"""One command that measures on a CUDA machine what a GPU is asked: copies, offloaded stage 3, activations, equal bits.

    python benchmarks/gpu.py [--size h200] [--only copies,equal,stage3,activations] [--json out.json]

It has not been run on a GPU yet: none was at hand when it was written. Every path was run on a CPU (`--device cpu --size
nano`, where the ratios mean nothing), and every call to torch.cuda was checked against torch's source.

Each trial runs in a process of its own, so that no peer inherits another's memory, and one that fails or is not installed is
shown, not dropped. All of it takes some minutes on an H200; `--minutes` bounds it, and what there was no time for is said.
Sizes follow the card: `h200` from 60 GiB on, else `small`, made for 8 GiB. Exit code 0: every target was met; 1: one was
missed or could not be measured (DeepSpeed not installed does not count); 4: there is no CUDA device.

copies       bytes a second to and from the device, of our seam and of the store, beside a plain pinned copy
equal        losses and parameters on host and disk, at prefetch 0, 1 and 4, are those of the device bit for bit
stage3       step time with parameters, gradients and optimizer on the host, beside FSDP2's CPUOffloadPolicy and DeepSpeed's
             ZeRO-Offload; `zhooks-host-<compute>-<kernel>` says where updates are computed and by whom
activations  a GPT of 2,048 tokens: everything saved goes to the host (`saved-host`; `-wide` lets more be under way), or unit
             inputs alone (`unit-host`), beside the same on the device; `unit-device` beside torch's own checkpoint. fp32 rows
             (`saved32`) have more arithmetic a byte.

"stall ms" is how long the compute stream of one step stood still for copies, "host ms" how long the host waited for them,
"over ms" what the step takes longer than the same step without offload, "floor ms" what the bytes put away take each way at
the plain copy's rate: a step that computes for less than that must wait.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from gpu_trials import SECTIONS, SIZES, Ask, Record
from launch import RECORD_PREFIX, read, report_failure
from peers import listed, positive

NO_CUDA = 4
MISSED = 1
LARGE_NBYTES = 60 << 30
#: A table that is piped into a file shall not be broken.
WIDTH = 120
#: A peer that is not installed is no failure of ours.
ABSENT = "ModuleNotFoundError"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one trial left: a record, or the error in one line."""

    section: str
    name: str
    record: Record | None
    error: str | None
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure beside what is asked of it; ``holds`` is None where it could not be measured."""

    what: str
    value: float | None
    target: str
    holds: bool | None
    note: str = ""


# --- running ----------------------------------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> list[Outcome]:
    """Every trial that was asked for, in order, until the time is over."""
    end = time.monotonic() + 60 * options.minutes
    console = Console(stderr=True)
    outcomes = []
    for section in options.only:
        for name in SECTIONS[section]:
            left = end - time.monotonic()
            if left <= 0:
                error: str | None = f"not run: the {options.minutes:g} minutes were over"
                outcomes.append(Outcome(section, name, None, error))
                continue
            console.print(f"{section}: {name}", style="dim")
            begin = time.monotonic()
            record, error = run_here(options, section, name) if options.here else run_apart(options, section, name, left)
            outcomes.append(Outcome(section, name, record, error, time.monotonic() - begin))
            if error is not None:
                console.print(f"{section}, {name}: {error}", style="red", markup=False, soft_wrap=True)
    return outcomes


def run_here(options: argparse.Namespace, section: str, name: str) -> tuple[Record | None, str | None]:
    """In this process."""
    try:
        return trial(options, section, name), None
    except Exception as error:
        return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def run_apart(options: argparse.Namespace, section: str, name: str, left_s: float) -> tuple[Record | None, str | None]:
    """In a process of its own, ended with all it has started when the time is over."""
    plain = {key: getattr(options, key) for key in ("device", "size", "steps", "rounds")}
    command = [sys.executable, str(Path(__file__).resolve()), "--trial", f"{section}/{name}"]
    command += [f"--{key}={value}" for key, value in plain.items()]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=left_s)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return None, f"no end after {left_s:.0f} s; it was killed"
        raise
    outcome = read(output, child.returncode)
    return outcome.record, outcome.error


def environment() -> dict[str, str]:
    """This one, the project importable, and cuBLAS told to be deterministic where it is asked to be."""
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def trial(options: argparse.Namespace, section: str, name: str) -> Record:
    device = torch.device(options.device)
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    ask = Ask(name, device, SIZES[options.size], options.steps, options.rounds)
    return SECTIONS[section][name](ask)


# --- judging ----------------------------------------------------------------------------------------------------------


def judge(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Every target that the sections run so far can speak for."""
    found = {(one.section, one.name): one for one in outcomes}
    sections = {one.section for one in outcomes}
    verdicts: list[Verdict] = []
    if "copies" in sections:
        verdicts += judge_copies(found)
    if "equal" in sections:
        verdicts.append(judge_equal(found["equal", "equal"]))
    if "stage3" in sections:
        verdicts += judge_stage3(found)
    if "activations" in sections:
        verdicts += judge_activations(found)
    return verdicts


Found = dict[tuple[str, str], Outcome]


def judge_copies(found: Found) -> list[Verdict]:
    record = found["copies", "copies"].record
    verdicts = []
    for way in ("h2d", "d2h"):
        for ours in ("seam", "store"):
            value = None if record is None else record["rates"][f"{way} {ours}"] / record["rates"][f"{way} plain"]
            verdicts.append(at_least(f"{way}, {ours} / plain pinned copy", value, 0.9))
    return verdicts


def judge_equal(outcome: Outcome) -> Verdict:
    if outcome.record is None:
        return Verdict("runs that differ from the device's", None, "0", None, outcome.error or "")
    differ = outcome.record["differ"]
    note = "; ".join(differ[:4]) or f"{outcome.record['compared']} compared"
    return Verdict("runs that differ from the device's", float(len(differ)), "0", not differ, note)


def judge_stage3(found: Found) -> list[Verdict]:
    ours = {name: step_s(found, "stage3", name) for name in SECTIONS["stage3"] if name.startswith("zhooks-host")}
    timed = {name: seconds for name, seconds in ours.items() if seconds is not None}
    best = min(timed, key=lambda name: timed[name]) if timed else None
    verdicts = []
    for peer in ("fsdp2-offload", "deepspeed-3-offload", "deepspeed-2-offload"):
        theirs, outcome = step_s(found, "stage3", peer), found["stage3", peer]
        what = f"step, {best or 'zhooks-host'} / {peer}"
        if theirs is None and (outcome.error or "").startswith(ABSENT):
            verdicts.append(Verdict(what, None, "< 1.00", True, "not installed"))
        else:
            value = None if theirs is None or best is None else timed[best] / theirs
            verdicts.append(Verdict(what, value, "< 1.00", None if value is None else value < 1.0))
    return verdicts


def judge_activations(found: Found) -> list[Verdict]:
    pairs = [
        ("saved-host", "saved-device", 1.03),
        ("saved-host-wide", "saved-device", 1.03),
        ("saved32-host", "saved32-device", 1.03),
        ("unit-host", "unit-device", 1.03),
        ("unit-device", "torch-checkpoint", 1.0),
    ]
    verdicts = []
    for one, other, target in pairs:
        mine, base = step_s(found, "activations", one), step_s(found, "activations", other)
        value = None if mine is None or base is None else mine / base
        holds = None if value is None else value <= target
        verdicts.append(Verdict(f"step, {one} / {other}", value, f"<= {target:.2f}", holds))
    return verdicts


def at_least(what: str, value: float | None, target: float) -> Verdict:
    return Verdict(what, value, f">= {target:.2f}", None if value is None else value >= target)


def step_s(found: Found, section: str, name: str) -> float | None:
    outcome = found.get((section, name))
    return None if outcome is None or outcome.record is None else float(outcome.record["step_s"])


# --- saying -----------------------------------------------------------------------------------------------------------


#: Row -> the row without offload that "over ms" is taken to.
BASES = {
    **dict.fromkeys((name for name in SECTIONS["stage3"] if name != "zhooks-device"), "zhooks-device"),
    "saved-host": "saved-device",
    "saved-host-wide": "saved-device",
    "saved32-host": "saved32-device",
    "unit-host": "unit-device",
}


def exposed(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """What each row's step waits for transfers, every way it is known, in seconds."""
    found = {(one.section, one.name): one for one in outcomes}
    copied = found.get(("copies", "copies"))
    rates = {} if copied is None or copied.record is None else copied.record["rates"]
    rows: dict[str, dict[str, float]] = {}
    for one in outcomes:
        if one.record is None or "step_s" not in one.record:
            continue
        row: dict[str, float] = {key: float(one.record[key]) for key in ("stalled_s", "blocked_s") if key in one.record}
        base = step_s(found, one.section, BASES.get(one.name, ""))
        if base is not None:
            row["over_s"] = float(one.record["step_s"]) - base
        if rates and one.record.get("stashed_nbytes"):
            row["floor_s"] = one.record["stashed_nbytes"] / min(rates["h2d plain"], rates["d2h plain"])
        rows[one.name] = row
    return rows


def say(console: Console, options: argparse.Namespace, outcomes: Sequence[Outcome], verdicts: Sequence[Verdict]) -> None:
    console.print(f"{machine(options.device)}, size {options.size}, torch {torch.__version__}")
    for one in outcomes:
        if one.section == "copies" and one.record is not None:
            rates = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in one.record["rates"].items())
            console.print(f"GB/s: {rates}" + ("; our slabs are not pinned" if one.record["pinned"] is False else ""))
    waits = exposed(outcomes)
    columns = ("stalled_s", "blocked_s", "over_s", "floor_s")
    heads = ("step ms", "stall ms", "host ms", "over ms", "floor ms", "device GB", "host GB")
    table = Table(Column("row", no_wrap=True), *(Column(head, justify="right") for head in heads), box=SIMPLE_HEAD)
    for one in outcomes:
        if one.section not in ("stage3", "activations"):
            continue
        if one.record is None:
            table.add_row(one.name, *["-"] * 7)
            continue
        row = waits[one.name]
        cells = [f"{1e3 * row[key]:.1f}" if key in row else "-" for key in columns]
        memory = [f"{one.record[key] / 1e9:.2f}" for key in ("device_nbytes", "host_nbytes")]
        table.add_row(one.name, f"{1e3 * one.record['step_s']:.1f}", *cells, *memory)
    console.print(table)
    targets = Table("figure", "value", "target", "", "note", box=SIMPLE_HEAD)
    for verdict in verdicts:
        value = "-" if verdict.value is None else f"{verdict.value:.3f}"
        mark = "?" if verdict.holds is None else "pass" if verdict.holds else "MISS"
        targets.add_row(verdict.what, value, verdict.target, mark, verdict.note)
    console.print(targets)
    for one in outcomes:
        if one.error is not None:
            console.print(f"{one.section}, {one.name}: {one.error}", markup=False, soft_wrap=True)


def machine(device: str) -> str:
    if not device.startswith("cuda"):
        return "a CPU (nothing here says anything about a GPU)"
    found = torch.cuda.get_device_properties(torch.device(device))
    return f"{found.name}, {found.total_memory / 2**30:.0f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit code."""
    options = parse(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("benchmarks/gpu.py: expected a CUDA device, found none that this torch can use.", file=sys.stderr)
        return NO_CUDA
    if options.size is None:
        options.size = size_for(options.device)
    if not options.device.startswith("cuda"):
        # On a machine that others use, threads that wait for each other cost more than they bring at such sizes.
        torch.set_num_threads(1)
    if options.trial is not None:
        section, _, name = options.trial.partition("/")
        try:
            print(RECORD_PREFIX + json.dumps(trial(options, section, name)), flush=True)
        except Exception as error:
            report_failure(error)
            return MISSED
        return 0
    outcomes = run_all(options)
    verdicts = judge(outcomes)
    document = {
        "machine": machine(options.device),
        "torch": torch.__version__,
        "size": options.size,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "exposed": exposed(outcomes),
        "trials": [asdict(outcome) for outcome in outcomes],
    }
    if options.json == Path("-"):
        print(json.dumps(document, indent=1))
    else:
        say(Console(width=max(WIDTH, Console().width)), options, outcomes, verdicts)
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(verdict.holds for verdict in verdicts) else MISSED


def size_for(device: str) -> str:
    if not device.startswith("cuda"):
        return "nano"
    return "h200" if torch.cuda.get_device_properties(torch.device(device)).total_memory >= LARGE_NBYTES else "small"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help='"cuda", "cuda:1", or "cpu" to see that the code runs')
    parser.add_argument("--size", choices=sorted(SIZES), help="default: by the memory of the card")
    parser.add_argument("--only", type=listed(SECTIONS), default=list(SECTIONS), help="comma-separated sections")
    parser.add_argument("--steps", type=positive, default=10, help="timed steps of a trial")
    parser.add_argument("--rounds", type=positive, default=7, help="rounds of the copies")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all of it")
    parser.add_argument("--here", action="store_true", help="all trials in this process: quicker, and memory is not told apart")
    parser.add_argument("--json", type=Path, help='file to write every record to; "-" prints it instead of the tables')
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
