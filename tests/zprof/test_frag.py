"""What ``zprof frag`` says: parts that sum to what is reserved, answers the allocator would give, and its exit codes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.allocator import ALLOC, DEFAULTS, EMPTY, RELEASE, Events, parse_settings, replay
from tests.support.zprof_snapshots import MIB, golden, made, random_run
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.allocator.fragmentation import parts, total, would_succeed
from zprof.allocator.history import history
from zprof.allocator.recordings import Recording, of_snapshot, of_trace, replayed_snapshot, score
from zprof.allocator.snapshot import INACTIVE, Snapshot, checked, reduced
from zprof.allocator.stranding import stranding
from zprof.cli import main
from zprof.rows import Row, RowKind, placed
from zprof.trace.reader import Trace

TEXTS = ["", "expandable_segments:True", "max_split_size_mb:20", "large_segment_size_mb:32,expandable_segments:True"]


def zprof(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["frag", *arguments])


def saved(folder: Path, raw: dict[str, Any]) -> str:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(raw, protocol=4))
    return str(path)


def ended(seed: int, text: str, count: int = 100) -> Snapshot:
    events = random_run(seed, count)
    return replayed_snapshot(events, replay(events, parse_settings(text), each=True))


# --- parts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(TEXTS), st.integers(1, 150))
def test_parts_sum_to_reserved_and_are_what_the_replay_counted(seed: int, text: str, count: int) -> None:
    chosen = parse_settings(text)
    events = random_run(seed, count)
    replayed = replay(events, chosen)
    held = parts(replayed.segments, chosen)
    for part in (*held, total(held)):
        assert part.reserved == part.allocated + part.pending + part.free
        assert min(part.rounding, part.pending, part.releasable, part.stuck, part.largest) >= 0
        assert part.largest <= part.free and 0 <= part.index <= 1
    last, whole = replayed.points[-1], total(held)
    counted = (last.reserved, last.allocated, last.pending, last.releasable, last.stuck, last.largest)
    assert counted == (whole.reserved, whole.allocated, whole.pending, whole.releasable, whole.stuck, whole.largest)


def test_the_golden_snapshot_has_the_parts_it_was_written_with() -> None:
    held = parts(checked(golden(), "golden").segments, DEFAULTS)
    told = {(part.large, part.stream): part for part in held}
    large = told[True, 0]
    assert (large.reserved, large.allocated, large.pending) == (84 * MIB, 8 * MIB, 2 * MIB)
    assert (large.rounding, large.releasable, large.stuck, large.largest) == (1024, 64 * MIB, 10 * MIB, 64 * MIB)
    expandable = told[True, 3]
    # Pages of 20 MiB start at 0, 20 and 40: of the free [1, 30) none is whole, of [31, 60) the last.
    assert (expandable.free, expandable.releasable, expandable.expandable) == (58 * MIB, 20 * MIB, True)
    assert told[True, 9].index == 0.0 and told[False, 0].rounding == 508
    assert expandable.index == 0.5


def test_a_private_pool_gives_nothing_back() -> None:
    raw = golden()
    raw["segments"][1]["segment_pool_id"] = (3, 0)
    part = next(part for part in parts(checked(raw, "x").segments, DEFAULTS) if part.pool == (3, 0))
    assert (part.releasable, part.stuck) == (0, 64 * MIB)


# --- would it succeed -------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(TEXTS),
    st.integers(1, 100),
    st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 300 * MIB)),
    st.integers(0, 100),
)
def test_the_answer_is_what_the_allocator_does_next(seed: int, text: str, count: int, nbytes: int, spare: int) -> None:
    chosen, events = parse_settings(text), random_run(seed, count)
    before = replay(events, chosen)
    limit = before.peak_reserved + spare * MIB
    before = replay(events, chosen, limit=limit)
    reserved = before.points[-1].reserved
    answer = would_succeed(before.segments, nbytes, chosen, device_free=limit - reserved)
    asked = Events.of([*_rows(events), (ALLOC, count, nbytes)])
    after = replay(asked, chosen, limit=limit)
    assert before.failed == 0
    assert answer.succeeds == (after.failed == 0), answer
    assert answer.rounded == chosen.rounded(nbytes)


def _rows(events: Events) -> list[tuple[int, int, int]]:
    return list(zip(events.action.tolist(), events.slot.tolist(), events.nbytes.tolist(), strict=True))


def test_an_unknown_device_leaves_the_question_open_and_says_what_would_decide_it() -> None:
    segments = checked(golden(), "golden").segments
    small = would_succeed(segments, 60 * MIB, DEFAULTS, device_free=None)
    large = would_succeed(segments, 400 * MIB, DEFAULTS, device_free=None)
    assert (small.succeeds, large.succeeds) == (True, None)
    assert "--limit" in large.reasons[-1]
    assert would_succeed(segments, 400 * MIB, DEFAULTS, device_free=400 * MIB).succeeds is True
    failed = would_succeed(segments, 400 * MIB, DEFAULTS, device_free=100 * MIB)
    assert failed.succeeds is False and "short" in failed.reasons[-1]


def test_a_free_block_of_another_stream_does_not_help() -> None:
    segments = checked(golden(), "golden").segments[3:4]
    own = would_succeed(segments, 30 * MIB, DEFAULTS, device_free=0, stream=9)
    assert own.reasons[0].startswith("the large pool of stream 9")
    # It can be released, though, and its memory asked for again.
    assert "released" in would_succeed(segments, 30 * MIB, DEFAULTS, device_free=0).reasons[-1]


# --- history and replays of recordings --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_history_undone_from_the_end_is_what_the_replay_went_through(text: str) -> None:
    events = random_run(5, 90)
    replayed = replay(events, parse_settings(text), each=True)
    snapshot = replayed_snapshot(events, replayed)
    levels = history(snapshot, points=10_000)
    assert len(levels) == len(snapshot.traces[0])
    last = levels[-1]
    state = replayed.points[-1]
    assert (last.reserved, last.largest) == (state.reserved, state.largest)
    assert max(level.reserved for level in levels) == replayed.peak_reserved
    assert min(level.allocated for level in levels) >= 0
    assert all(level.allocated + level.pending <= level.reserved for level in levels)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_recording_replayed_under_its_own_settings_reserves_what_it_did(seed: int, text: str) -> None:
    recording = of_snapshot(ended(seed, text))
    told = score(recording, replay(recording.events, parse_settings(text), each=True))
    assert told is not None
    assert (told.peak_error, told.mean_error) == (0.0, 0.0)
    assert told.count == len(recording.events)


def test_a_recording_without_its_beginning_is_replayed_on_top_of_what_was_held() -> None:
    snapshot = ended(3, "")
    cut = Snapshot(snapshot.segments, (snapshot.traces[0][-60:],), "")
    recording = of_snapshot(cut)
    assert recording.begun > 0 and recording.events.held > 0
    replayed = replay(recording.events, each=True)
    held = sum(block.requested for segment in snapshot.segments for block in segment.blocks if block.state != INACTIVE)
    # Blocks keep up to 1 MiB more than they were asked for, depending on where they lie.
    assert held <= replayed.points[-1].allocated < 1.1 * held
    told = score(recording, replayed)
    assert told is not None and abs(told.peak_error) < 0.5


def test_an_emptied_cache_is_found_in_a_history() -> None:
    rows = [(ALLOC, 0, 40 * MIB), (RELEASE, 0, 0), (EMPTY, 0, 0), (ALLOC, 1, 12 * MIB)]
    events = Events.of(rows)
    recording = of_snapshot(replayed_snapshot(events, replay(events, each=True)))
    assert recording.events.action.tolist() == [ALLOC, RELEASE, EMPTY, ALLOC]
    assert recording.reserved.tolist() == [40 * MIB, 40 * MIB, 0, 12 * MIB]


def test_what_the_allocator_gave_back_at_its_limit_is_left_to_the_replay() -> None:
    events = Events.of([(ALLOC, 0, 40 * MIB), (RELEASE, 0, 0), (ALLOC, 1, 60 * MIB)])
    recording = of_snapshot(replayed_snapshot(events, replay(events, limit=64 * MIB, each=True)), limited=True)
    assert EMPTY not in recording.events.action
    told = score(recording, replay(recording.events, limit=64 * MIB, each=True))
    assert told is not None and told.mean_error == 0


def test_a_failed_request_says_the_limit() -> None:
    recording = of_snapshot(checked(golden(), "golden"))
    assert recording.limit == 178 * MIB + 100 * MIB
    assert recording.events.action.tolist()[-2:] == [ALLOC, RELEASE]


def storage(kind: RowKind, ident: int, nbytes: int, time_ns: int, category: str = "activation", tier: str = "device") -> Row:
    return Row(kind, placed(category, tier), f"unit.{ident}", nbytes, time_ns, 0, ident)


def traced(folder: Path, rows: list[Row], **changes: Any) -> Recording:
    return of_trace(Trace.open(write_trace(folder / "run.zprof", rows, **changes)))


def test_a_storage_that_changes_its_category_is_one_allocation(tmp_path: Path) -> None:
    rows = [
        storage(RowKind.ALLOC, 1, 4 * MIB, 10),
        storage(RowKind.FREE, 1, 4 * MIB, 20),
        storage(RowKind.ALLOC, 1, 4 * MIB, 20, category="gradient"),
        storage(RowKind.FREE, 1, 4 * MIB, 30, category="gradient"),
        storage(RowKind.ALLOC, 1, 2 * MIB, 40),
        storage(RowKind.ALLOC, 2, 9 * MIB, 41, tier="host"),
        storage(RowKind.FREE, 3, 9 * MIB, 42),
    ]
    events = traced(tmp_path, rows).events
    assert events.action.tolist() == [ALLOC, RELEASE, ALLOC]
    assert events.slot.tolist() == [0, 0, 1]
    assert events.nbytes.tolist() == [4 * MIB, 0, 2 * MIB]
    assert [events.labels[label] for label in events.label.tolist()] == ["unit.1"] * 3


def test_rows_out_of_order_are_replayed_in_the_order_of_time(tmp_path: Path) -> None:
    rows = [storage(RowKind.FREE, 1, MIB, 30), storage(RowKind.ALLOC, 2, MIB, 20), storage(RowKind.ALLOC, 1, MIB, 10)]
    events = traced(tmp_path, rows).events
    assert (events.action.tolist(), events.time_ns.tolist()) == ([ALLOC, ALLOC, RELEASE], [10, 20, 30])


def test_a_trace_is_held_against_the_counters_it_has(tmp_path: Path) -> None:
    rows = [
        storage(RowKind.ALLOC, 1, 12 * MIB, 10),
        Row(RowKind.COUNTER, "cuda reserved", "cuda:0", 12 * MIB, 15),
        storage(RowKind.ALLOC, 2, 30 * MIB, 20),
        Row(RowKind.COUNTER, "cuda reserved", "cuda:0", 50 * MIB, 25),
    ]
    recording = traced(tmp_path, rows, device="cuda:0")
    told = score(recording, replay(recording.events, each=True))
    assert told is not None
    assert (told.peak_recorded, told.peak_predicted, told.mean_error) == (50 * MIB, 42 * MIB, 4 * MIB)


# --- the command ------------------------------------------------------------------------------------------------------


def test_need_decides_the_exit_code(tmp_path: Path) -> None:
    raw = golden()
    del raw["device_traces"][0][2]
    path = saved(tmp_path, raw)
    assert zprof(path).exit_code == 0
    assert zprof(path, "--need", "60MiB").exit_code == 0
    assert zprof(path, "--need", "400MiB").exit_code == 4
    assert zprof(path, "--need", "400MiB", "--limit", "200MiB").exit_code == 3
    assert zprof(path, "--need", "400MiB", "--limit", "1GiB").exit_code == 0


def test_text_names_pools_figures_and_the_environment_line(tmp_path: Path) -> None:
    done = zprof(saved(tmp_path, made(4)), "--need", "1MiB")
    assert done.exit_code == 0, done.output
    for said in ("large, stream 0", "releasable", "stuck", "1 MiB: would succeed", "worst moment", "(+0.0%)", "(recorded)"):
        assert said in done.output
    assert "under expandable_segments:True: reserved peak" in done.output
    assert "PYTORCH_ALLOC_CONF='expandable_segments:True'" in done.output
    assert "\x1b" not in done.output


def test_json_has_the_same_in_bytes(tmp_path: Path) -> None:
    done = zprof(saved(tmp_path, made(4)), "--need", "1MiB", "--settings", "expandable_segments:True", "--json")
    told = json.loads(done.output)
    assert told["total"]["reserved"] == sum(part["reserved"] for part in told["pools"])
    assert [each["settings"] for each in told["replays"]] == ["", "expandable_segments:True"]
    assert told["need"]["succeeds"] is True and told["score"]["peak_error"] == 0.0
    assert told["worst"]["stuck"] == max(level["stuck"] for level in told["history"])


def test_a_cpu_run_is_a_what_if_by_replay(tmp_path: Path) -> None:
    path = str(write_trace(tmp_path / "run.zprof", list(sample_rows(level="alloc", steps=2)), level="alloc"))
    done = zprof(path, "--limit", "1GiB", "--need", "2GiB")
    assert done.exit_code == 3
    assert "what-if by replay" in done.output and "was recorded on cpu" in done.output
    told = json.loads(zprof(path, "--at", "end", "--json").output)
    assert told["what_if"] is True and told["score"] is None and told["total"]["allocated"] == 0


def test_a_run_that_would_fail_says_where_and_with_how_much_free(tmp_path: Path) -> None:
    events, limit = stranding(arena=False)
    sizes = {slot: nbytes for action, slot, nbytes in _rows(events) if action == ALLOC}
    rows = [
        storage(RowKind.ALLOC if action == ALLOC else RowKind.FREE, slot + 1, sizes[slot], 10 + number)
        for number, (action, slot, _) in enumerate(_rows(events))
    ]
    path = str(write_trace(tmp_path / "run.zprof", rows))
    done = zprof(path, "--limit", f"{limit // MIB}MiB", "--settings", "expandable_segments:True")
    assert done.exit_code == 0, done.output
    assert "fails at event" in done.output and "(32% of the limit)" in done.output
    assert "failures 1 -> 0" in done.output


def test_a_run_with_a_snapshot_speaks_of_that(tmp_path: Path) -> None:
    path = str(write_trace(tmp_path / "run.zprof", [], notes={"snapshot": reduced(golden())}, device="cuda:0"))
    told = json.loads(zprof(path, "--json").output)
    assert told["what_if"] is False and told["total"]["reserved"] == 178 * MIB


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["/nonexistent"], 1, "/nonexistent: expected a trace or a snapshot, found: No such file or directory; check the path"),
        (["FILE", "--need", "many"], 2, "expected a size such as 512MiB"),
        (["FILE", "--settings", "expandable:True"], 2, "did you mean expandable_segments?"),
        (["FILE", "--device", "5"], 1, "expected device 5, found 0; choose one of them"),
        (["FILE", "--limit", "1MiB"], 1, "expected a limit of at least the 178 MiB reserved, found 1 MiB; raise --limit"),
        (["EMPTY"], 1, "expected allocations, found none; record with zprof run --level alloc"),
    ],
)
def test_mistakes_are_one_line_with_their_exit_code(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    names = {"FILE": saved(tmp_path, golden()), "EMPTY": str(write_trace(tmp_path / "empty.zprof", []))}
    done = zprof(*(names.get(argument, argument) for argument in arguments))
    assert done.exit_code == code
    assert said in " ".join(done.output.split())
    assert code == 2 or done.output.count("\n") == 1


def test_names_from_a_file_reach_no_terminal_as_they_are(tmp_path: Path) -> None:
    raw = golden()
    raw["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "\x1b[31m[bold]x:1"
    done = zprof(saved(tmp_path, raw))
    assert done.exit_code == 0 and "\x1b" not in done.output


def test_an_empty_snapshot_is_an_answer(tmp_path: Path) -> None:
    done = zprof(saved(tmp_path, {"segments": [], "device_traces": []}))
    assert done.exit_code == 0 and "nothing is reserved" in done.output and "no history" in done.output
