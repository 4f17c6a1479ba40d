"""Waits of a training loop for torch's DataLoader: each is recorded as long as it was, and the report says what would help."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader

import zprof
from tests.support import forked
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import HEADER, write_trace
from zprof.analysis.analysis import Analysis
from zprof.analysis.children import Children, Kind
from zprof.analysis.coverage import Unseen
from zprof.analysis.loading import Loading, loading
from zprof.analysis.measures import measures
from zprof.analysis.ranks import lane_of
from zprof.recording.loaders import LoaderListener, watch_loaders
from zprof.rows import Row, RowKind
from zprof.trace.reader import Trace

MS = 1_000_000


class Numbers(Dataset[torch.Tensor]):
    """Eight rows, of which some may not be made."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise KeyError(index)
        return torch.full((3,), float(index))


def waits(path: Path, what: str = "wait data") -> list[str]:
    with zprof.open(path) as run:
        return [span.key for span in run.spans(what)]


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_every_batch_is_a_wait_as_long_as_the_loop_waited(tmp_path: Path) -> None:
    # The script's own clock, read around each batch, bounds each span; the dataset's own sleep is the least of it.
    code = """
import json, time, torch, zprof
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        time.sleep(0.004)
        return index
loader, taken = DataLoader(Slow(), batch_size=2), []
with zprof.record("run.zprof", nvml="off"):
    batches = iter(loader)
    for _ in range(3):
        begin = time.monotonic_ns()
        next(batches)
        taken.append((begin, time.monotonic_ns()))
with zprof.open("run.zprof") as run:
    zero = run._trace.header.mono_ns
    spans = [(round(span.begin_s * 1e9) + zero, round(span.end_s * 1e9) + zero) for span in run.spans("wait data")]
print(json.dumps([taken, spans]))
"""
    done = forked.python("-c", code, at=tmp_path)
    assert not done.returncode, done.stderr
    taken, spans = json.loads(done.stdout)
    assert len(spans) == 3
    for (begin, end), (recorded_begin, recorded_end) in zip(taken, spans, strict=True):
        assert begin <= recorded_begin + 1000 and recorded_end <= end + 1000
        assert recorded_end - recorded_begin >= 8 * MS


@pytest.mark.parametrize(("persistent", "started"), [(False, 2), (True, 1)])
def test_starting_workers_and_first_batches_are_told_from_the_others(persistent: bool, started: int, tmp_path: Path) -> None:
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent)
    with zprof.record(tmp_path / "run.zprof", nvml="off"):
        taken = [batch.sum().item() for _ in range(2) for batch in loader]
    assert taken == [3.0, 15.0, 27.0, 39.0] * 2
    # The last wait of each epoch is for the end.
    counted = {"Numbers (starting workers)": started, "Numbers (first batch)": 2, "Numbers": 8}
    assert Counter(waits(tmp_path / "run.zprof")) == counted
    note = Trace.open(tmp_path / "run.zprof").notes("loaders")[-1].body
    (only,) = note["loaders"]
    assert only == {
        "name": "Numbers", "dataset": "Numbers", "sampler": "SequentialSampler", "workers": 2, "batch": 2, "prefetch": 2,
        "persistent": persistent, "pinned": False,
    }  # fmt: skip


def test_loaders_that_differ_have_names_of_their_own_and_one_made_anew_keeps_its_name(tmp_path: Path) -> None:
    part = torch.utils.data.Subset(Numbers(), [0, 1])
    with zprof.record(tmp_path / "run.zprof", nvml="off"):
        for dataset, more in ((Numbers(), {}), (Numbers(), {"shuffle": True}), (Numbers(), {}), (part, {"batch_size": 2})):
            list(DataLoader(dataset, **more))
    found = Counter(key.removesuffix(" (first batch)") for key in waits(tmp_path / "run.zprof"))
    assert found == {"Numbers": 18, "Numbers (2)": 9, "Subset of Numbers": 2}


def test_workers_of_a_loader_are_named_by_it_among_the_children(tmp_path: Path) -> None:
    code = """
import time, torch, zprof
from torch.utils.data import DataLoader, Dataset
from zprof.trace.reader import Trace
class Rows(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index
with zprof.record("run.zprof", nvml="off", interval_s=0.005):
    batches = iter(DataLoader(Rows(), num_workers=2, multiprocessing_context="fork"))
    until = time.monotonic() + 300
    def named():
        who = Trace.growing("run.zprof").notes("children")[-1].body.get("peak", {"who": []})["who"]
        return sorted(each[2] for each in who if each[1] == "loader workers")
    while named() != ["Rows, worker 0", "Rows, worker 1"] and time.monotonic() < until:
        time.sleep(0.01)
    print(named())
"""
    done = forked.python("-c", code, at=tmp_path)
    assert done.stdout == "['Rows, worker 0', 'Rows, worker 1']\n", done.stderr


def test_a_thread_beside_training_that_loads_waits_for_nobody(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with zprof.record(tmp_path / "run.zprof", nvml="off"):
        optimizer.step()
        beside = threading.Thread(target=lambda: list(DataLoader(Numbers(), batch_size=4)))
        beside.start(), beside.join()
        list(DataLoader(Numbers(), batch_size=8))
    assert Counter(waits(tmp_path / "run.zprof", "load data")) == {"Numbers (first batch)": 1, "Numbers": 2}
    assert Counter(waits(tmp_path / "run.zprof")) == {"Numbers (2) (first batch)": 1, "Numbers (2)": 1}


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_dataset_reaches_the_script_and_ends_the_wait(workers: int, tmp_path: Path) -> None:
    how: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    with zprof.record(tmp_path / "run.zprof", nvml="off"):
        batches = iter(DataLoader(Numbers(bad=1), num_workers=workers, **how))
        next(batches)
        with pytest.raises(KeyError):
            next(batches)
    with zprof.open(tmp_path / "run.zprof") as run:
        assert len([span for span in run.spans("wait data") if not span.key.endswith("workers)")]) == 2


def test_recordings_at_once_each_see_all_and_torch_is_as_it_was_after_the_last(tmp_path: Path) -> None:
    before = vars(dataloader._BaseDataLoaderIter)["__next__"], vars(DataLoader)["__iter__"]
    first = zprof.Recorder(tmp_path / "1.zprof", nvml="off").start()
    second = zprof.Recorder(tmp_path / "2.zprof", nvml="off").start()
    list(DataLoader(Numbers(), batch_size=8))
    first.close()
    list(DataLoader(Numbers(), batch_size=8))
    assert (vars(dataloader._BaseDataLoaderIter)["__next__"], vars(DataLoader)["__iter__"]) != before
    second.close()
    assert (vars(dataloader._BaseDataLoaderIter)["__next__"], vars(DataLoader)["__iter__"]) == before
    assert (len(waits(tmp_path / "1.zprof")), len(waits(tmp_path / "2.zprof"))) == (2, 4)


def test_a_mistake_of_ours_ends_the_spans_and_not_the_loop(tmp_path: Path) -> None:
    class Odd(DataLoader[torch.Tensor]):
        sampler = property(lambda self: 1 / 0, lambda self, value: None)

    said: list[str] = []

    def row(*_: object) -> None:
        raise AssertionError("a row after the mistake")

    leave = watch_loaders(LoaderListener(row, lambda: True, lambda body: None, said.append))
    try:
        assert len(list(Odd(Numbers(), batch_sampler=[[0, 1], [2]]))) == 2
    finally:
        leave()
    assert said == ["ZeroDivisionError: division by zero"]


# --- what is made of it -----------------------------------------------------------------------------------------------

LOADER = {"name": "Rows", "workers": 4, "batch": 2, "prefetch": 2, "persistent": False, "pinned": False}


def rows_of(wait_ms: float, *, first_ms: float = 0, starting_ms: float = 0, steps: int = 6, epoch: int = 2) -> list[Row]:
    """Steps of 100 ms; each waits for a batch at its begin, every ``epoch`` of them for new workers and a first batch."""
    rows = []
    for step in range(steps):
        at = HEADER.mono_ns + step * 100 * MS
        parts = {"Rows": wait_ms}
        if step % epoch == 1:
            parts = {"Rows (starting workers)": starting_ms, "Rows (first batch)": first_ms, "Rows": wait_ms}
        for key, ms in parts.items():
            if ms:
                rows.append(Row(RowKind.BEGIN, "wait data", key, 0, at))
                at += round(ms * MS)
                rows.append(Row(RowKind.END, "wait data", key, 0, at))
        end = HEADER.mono_ns + (step + 1) * 100 * MS
        rows += [Row(RowKind.BEGIN, "step", "SGD", 0, end - MS), Row(RowKind.END, "step", "SGD", 0, end)]
    return rows


def found_in(
    path: Path,
    rows: list[Row],
    busy: float | None = None,
    queued: float | None = None,
    cores: int = 16,
    device: str = "cpu",
    **loader: Any,
) -> Loading | Unseen:
    note = {"loaders": [LOADER | loader], "cores": cores}
    trace = Trace.open(write_trace(path, rows, notes={"loaders": note}, zhooks=False, device=device))
    workers = Kind("loader workers", 4, 1, 1, 1, busy, queued)
    under = Children(4, 4, (workers,), 1, 1, 1, 1, None, (), None)
    analysis = Analysis.of(trace)
    return loading(trace, analysis.stalls, analysis.covered, under)


def test_waits_are_parted_by_what_they_were_for_and_add_up(tmp_path: Path) -> None:
    found = found_in(tmp_path / "run.zprof", rows_of(10, first_ms=20, starting_ms=5))
    assert isinstance(found, Loading)
    (loader,) = found.loaders
    # Of five steps counted three begin an epoch.
    assert (found.wait_ns, found.step_ns, loader.wait_ns) == (25 * MS, 100 * MS, 25 * MS)
    assert (loader.steady_ns, loader.first_ns, loader.starting_ns, loader.epochs) == (10 * MS, 12 * MS, 3 * MS, 3)
    assert found.share == 0.25 and (loader.workers, loader.persistent) == (4, False)


OWN_THREAD = "num_workers=2 or more prepares batches in parallel with training, whose own thread does it now"
BUSY = "its 4 workers are the bottleneck, each busy for 93% of a core: "
TWICE = f"{BUSY}num_workers=8 would keep up, if each were as fast as now"
FEW_CORES = (
    f"{BUSY}num_workers=6 is one for each core there is, and 8 would be needed: make batches cheaper (decode and augment less, "
    "or beforehand)"
)
NO_CORES = (
    "its 4 workers are the bottleneck: with 4 cores 8 would be needed: make batches cheaper (decode and augment less, or "
    "beforehand)"
)
THEY_WAIT = (
    "its 4 workers mostly wait, each busy for 5% of a core: for storage, the network or a lock; more workers and a larger "
    "prefetch_factor help if that can serve more"
)
STARVED = (
    "its 4 workers have no core for 62% of the time, each busy for 30% of a core: there are too few cores for "
    "workers and other processes; use fewer workers or threads, or more cores (a container's limit counts)"
)
PERSIST = (
    "persistent_workers=True keeps its workers: starting them again and waiting for the first batch took 60 ms in each of 3 "
    "epochs"
)
NEW_WORKERS = rows_of(1, first_ms=40, starting_ms=20)


@pytest.mark.parametrize(
    ("rows", "how", "advice"),
    [
        (rows_of(4), {}, []),
        (rows_of(60), {"workers": 0}, [OWN_THREAD]),
        # Half of each step is waiting: twice as many workers.
        (rows_of(50), {"busy": 0.93}, [TWICE]),
        (rows_of(50), {"busy": 0.93, "cores": 6}, [FEW_CORES]),
        (rows_of(50), {"cores": 4}, [NO_CORES]),
        (rows_of(50), {"busy": 0.05, "queued": 0.1}, [THEY_WAIT]),
        (rows_of(50), {"busy": 0.3, "queued": 0.62}, [STARVED]),
        (NEW_WORKERS, {}, [PERSIST]),
        (NEW_WORKERS, {"persistent": True}, []),
        (rows_of(60), {"workers": None}, []),
    ],
)
def test_the_remedy_follows_from_what_was_waited_for(
    rows: list[Row], how: dict[str, Any], advice: list[str], tmp_path: Path
) -> None:
    found = found_in(tmp_path / "run.zprof", rows, **how)
    assert isinstance(found, Loading) and list(found.advice) == [f"Rows: {line}" for line in advice]


def test_on_a_gpu_waits_for_data_are_seen_where_others_are_not(tmp_path: Path) -> None:
    found = found_in(tmp_path / "run.zprof", rows_of(50), device="cuda:0")
    assert isinstance(found, Loading) and found.share == 0.5
    assert found.advice[1] == "Rows: pin_memory=True, so that copies to the GPU (non_blocking=True) overlap with its compute"
    values = measures(Analysis.of(Trace.open(tmp_path / "run.zprof")))
    assert values["exposed.data.percent"] == 50.0 and isinstance(values["exposed.ms_per_step"], Unseen)


def test_a_plain_script_that_waits_for_data_has_that_as_exposed_time_and_no_zero_for_the_rest(tmp_path: Path) -> None:
    found_in(tmp_path / "run.zprof", rows_of(30))
    values = measures(Analysis.of(Trace.open(tmp_path / "run.zprof")))
    assert values["exposed.data.ms_per_step"] == values["exposed.ms_per_step"] == 30.0
    assert all(isinstance(values[f"exposed.{wait}.ms_per_step"], Unseen) for wait in ("collective", "gather"))


def test_a_rank_that_waits_for_data_is_slow_by_itself(tmp_path: Path) -> None:
    trace = Trace.open(write_trace(tmp_path / "run.zprof", rows_of(40), notes={
        "loaders": {"loaders": [LOADER]}, "collectives": {"why": ""}
    }, zhooks=False))  # fmt: skip
    assert lane_of(Analysis.of(trace)).work_ns == 100 * MS


def test_the_report_has_a_section_of_loaders_and_no_control_characters_of_theirs(zprof: Zprof, tmp_path: Path) -> None:
    found_in(tmp_path / "run.0.zprof", [row._replace(key=row.key.replace("Rows", "R\x1b[2J")) for row in rows_of(40)])
    text = zprof("report").stdout
    assert "waited for data 40 ms per step, 40% of it" in text and "\x1b" not in text
    data = json.loads(zprof("report", "--json").stdout)["runs"][0]["data"]
    assert data["loaders"][0] | {"name": ""} == {
        "name": "", "workers": None, "batch": None, "prefetch": None, "persistent": None, "pinned": None, "ms_per_step": 40.0,
        "first_ms_per_step": 0.0, "starting_ms_per_step": 0.0, "epochs": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("note", "why"), [
    ({}, "not seen: no data loader of torch's was iterated"),
    ({"loaders": {"loaders": []}}, "not seen: no data loader of torch's was iterated"),
    ({"loaders": {"why": "AttributeError: x"}}, "not seen: torch's data loaders could not be followed: AttributeError: x"),
])  # fmt: skip
def test_without_a_loader_the_report_says_so_and_not_zero(note: dict[str, Any], why: str, zprof: Zprof, tmp_path: Path) -> None:
    steps = [row for row in rows_of(10) if row.what == "step"]
    write_trace(tmp_path / "run.0.zprof", steps, notes=note, zhooks=False)
    report = json.loads(zprof("report", "--json").stdout)["runs"][0]
    assert report["data"] is None and report["unseen"]["exposed.data.ms_per_step"] == why
