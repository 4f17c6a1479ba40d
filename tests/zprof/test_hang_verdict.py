"""What two looks at a job say: by hand-made looks, each way that ranks can stand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from zprof.analysis.coverage import Coverage
from zprof.living.jobs import Job, Member
from zprof.living.looks import Look, Worker
from zprof.living.places import Kind, Place, place_of
from zprof.living.processes import Process, State
from zprof.living.recorded import Activity, Doing
from zprof.living.stacks import Frame, Stacks, Thread
from zprof.living.verdict import Finding, Verdict, judged, named_ranks

SECOND = 10**9
TORCH = "/venv/lib/python3.11/site-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"


def process(rank: int, state: State = State.SLEEPING) -> Process:
    return Process(1000 + rank, 1000 + rank, 1, "python", ("python", "train.py"), 0, state, 1.0)


def doing(rows: int = 100, wait: Activity | None = None, **changes: Any) -> Doing:
    plain: dict[str, Any] = {"last_ns": 5 * SECOND, "newest_ns": 9 * SECOND, "steps": 7, "in_step": False, "unit": None}
    plain |= {"phase": None, "waits": (wait,) if wait else (), "under_way": (), "begun": None, "held": {}, "samples": {}}
    return Doing(rows, **(plain | {"covered": Coverage("events", True, False, ("device",))} | changes))


def waiting(key: str = "layers.7", what: str = "wait reduce", begin_ns: int = 2 * SECOND) -> Activity:
    return Activity(what, key, begin_ns, 0)


def code(line: int = 88, name: str = "load_batch", kind: Kind = Kind.CODE, wait: str = "") -> Place:
    return Place(kind, wait, (Frame("/home/me/train.py", name, line), Frame("/home/me/train.py", "main", 60)))


def look(rank: int, place: Place | None = None, **changes: Any) -> Look:
    plain: dict[str, Any] = {"process": process(rank), "time_ns": 10 * SECOND, "place": place, "spent_s": 5.0}
    plain["moved_nbytes"] = 0
    return Look(f"rank {rank}", rank, **(plain | changes))


def verdict(before: Sequence[Look], after: Sequence[Look], *, world: int | None = None, moved: Sequence[str] = ()) -> Verdict:
    members = tuple(Member(each.rank, each.process) for each in after)
    return judged(Job("job", members, world or len(members), len(members)), before, after, 2.0, moved)


def test_the_one_that_does_not_come_is_named_with_its_line() -> None:
    looks = [look(rank, code(61, "main"), doing=doing(wait=waiting())) for rank in (0, 2, 3)]
    looks.insert(1, look(1, code(), doing=doing()))
    found = verdict(looks, looks)
    assert found.hangs and found.finding is Finding.MISSING
    assert found.text == (
        "ranks 0, 2 and 3 wait in reduce layers.7 for 8 s; rank 1 is not there: it is in train.py:88 load_batch"
    )
    assert [[each.rank for each in group.looks] for group in found.groups] == [[0, 2, 3], [1]]


@pytest.mark.parametrize(
    ("then", "now", "moved"),
    [
        (look(1, code(88)), look(1, code(89)), ()),
        (look(1, code()), look(1, code()), ("rank 1",)),
        (look(1, code(), doing=doing(100)), look(1, code(), doing=doing(101)), ()),
        (look(1, code()), look(1, code(), spent_s=6.9), ()),
        (look(1, code()), look(1, code(), moved_nbytes=64 << 20), ()),
    ],
)
def test_a_late_rank_that_moves_or_works_is_no_hang(then: Look, now: Look, moved: Sequence[str]) -> None:
    waits = look(0, code(61, "main"), doing=doing(wait=waiting()))
    found = verdict([waits, then], [waits, now], moved=moved)
    assert not found.hangs and found.finding is Finding.MOVES
    assert found.text.startswith("no hang seen: rank 0 waits in reduce layers.7 for 8 s, and rank 1 moves: in train.py:")


def test_another_wait_of_the_same_name_is_a_rank_that_moves() -> None:
    then, now = (look(0, doing=doing(wait=waiting(begin_ns=at))) for at in (SECOND, 2 * SECOND))
    assert verdict([then], [now]).finding is Finding.MOVES


def test_ranks_in_different_collectives_are_told_apart() -> None:
    looks = [
        look(0, code(61, "main"), doing=doing(wait=waiting())),
        look(1, code(40, "log"), doing=doing(wait=waiting("norm"))),
    ]
    found = verdict(looks, looks)
    assert found.hangs and found.finding is Finding.DIFFERENT
    assert found.text == (
        "ranks are in different collectives: rank 0 waits in reduce layers.7 for 8 s (train.py:61 main); rank 1 waits in "
        "reduce norm for 8 s (train.py:40 log)"
    )


def test_the_same_collective_by_another_count_is_a_different_one() -> None:
    wait = waiting("all_reduce", "wait collective")
    counts = [57, 58, 57]
    looks = [look(rank, code(61, "main"), doing=doing(wait=wait, begun={"all_reduce": counts[rank]})) for rank in range(3)]
    found = verdict(looks, looks)
    assert found.finding is Finding.DIFFERENT and "rank 1 waits in all_reduce (number 58)" in found.text
    assert "ranks 0 and 2 wait in all_reduce (number 57)" in found.text


def test_all_in_one_collective_hang_in_it() -> None:
    looks = [look(rank, code(61, "main", Kind.COLLECTIVE, "all_reduce")) for rank in range(9)]
    found = verdict(looks, looks)
    assert found.hangs and found.finding is Finding.TOGETHER
    assert found.text.startswith("ranks 0-8 wait in all_reduce for at least 2 s: all are there; ")


def test_ranks_of_other_machines_that_nobody_sees_are_counted() -> None:
    looks = [look(rank, code(61, "main", Kind.COLLECTIVE, "all_reduce")) for rank in range(2)]
    found = verdict(looks, looks, world=8)
    assert found.finding is Finding.MISSING and "6 of 8 ranks run on other machines" in found.text


def test_a_rank_that_spins_for_its_device_waits_and_one_that_spins_in_a_collective_works() -> None:
    for kind, waits in ((Kind.DEVICE, True), (Kind.COLLECTIVE, False)):
        place = code(50, "main", kind, "the device")
        found = verdict([look(0, place)], [look(0, place, spent_s=7.0)])
        assert found.hangs is waits, found.text


def test_a_rank_that_is_gone_is_named_with_its_end() -> None:
    gone = look(1, process=None, gone="killed by signal 9 (SIGKILL)")
    waits = look(0, code(61, "main"), doing=doing(wait=waiting()))
    found = verdict([waits, look(1, code())], [waits, gone])
    assert found.hangs
    assert found.text == "rank 0 waits in reduce layers.7 for 8 s; rank 1 is gone (killed by signal 9 (SIGKILL))"


def test_ranks_that_move_beside_one_that_is_gone_are_no_hang_yet() -> None:
    gone = look(1, process=None, gone="killed by signal 9 (SIGKILL)")
    found = verdict([look(0, code(1)), gone], [look(0, code(2)), gone])
    assert not found.hangs and found.text.endswith("rank 1 is gone (killed by signal 9 (SIGKILL))")


def test_all_that_stand_still_outside_of_collectives_hang() -> None:
    looks = [look(rank, code()) for rank in range(2)]
    assert verdict(looks, looks).text == "ranks 0 and 1 are stuck in train.py:88 load_batch; no rank is in a collective"


def test_a_loader_is_followed_into_its_worker() -> None:
    place = code(90, "main", Kind.LOADER, "a batch of the loader")
    late = look(1, place, workers=(Worker(7, code(12, "Words.__getitem__")),))
    waits = look(0, code(61, "main"), doing=doing(wait=waiting()))
    found = verdict([waits, late], [waits, late])
    assert found.text.endswith("train.py:90 main, waiting for a loader whose worker is in train.py:12 Words.__getitem__")


def test_a_job_that_was_killed_says_what_it_waited_in() -> None:
    left = doing(wait=waiting())
    looks = [
        look(0, process=None, gone="killed: its trace has no end", doing=left),
        look(1, code(), process=None, gone="killed: its trace has no end", doing=doing(), noted_ns=SECOND),
    ]
    found = verdict(looks, looks)
    assert found.hangs
    assert found.text == (
        "no rank runs any more: ranks 0 and 1 are gone (killed: its trace has no end); when they ended, rank 0 waited in "
        "reduce layers.7 for 7 s; rank 1 was in train.py:88 load_batch"
    )


def test_what_cannot_be_seen_is_no_answer() -> None:
    denied = look(0, unseen="no right", denied=True)
    assert verdict([denied], [denied]).finding is Finding.UNSEEN


def test_many_ranks_are_named_shortly() -> None:
    assert named_ranks([look(rank) for rank in (*range(30), 40, 42)]) == "ranks 0-29, 40 and 42"


# --- where a stack is -------------------------------------------------------------------------------------------------


def stacks(*frames: Frame, others: Sequence[Thread] = ()) -> Stacks:
    return Stacks((Thread("MainThread", 1, frames), *others), "py-spy")


MAIN = Frame("/home/me/train.py", "main", 60)
BACKWARD = (
    Frame(f"{TORCH}/autograd/graph.py", "_engine_run_backward", 979),
    Frame(f"{TORCH}/_tensor.py", "Tensor.backward", 623),
)


@pytest.mark.parametrize(
    ("frames", "kind", "name"),
    [
        ((Frame(C10D, "all_reduce", 3), Frame(f"{TORCH}/distributed/c10d_logger.py", "wrapper", 83)), Kind.COLLECTIVE,
         "all_reduce"),
        ((Frame(C10D, "all_gather", 1), Frame(C10D, "all_gather_object", 2)), Kind.COLLECTIVE, "all_gather_object"),
        ((Frame(C10D, "_new_process_group_helper", 1), Frame(C10D, "init_process_group", 2)), Kind.COLLECTIVE,
         "init_process_group"),
        (
            (
                Frame(C10D, "all_gather_single", 4394),
                Frame(f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", "foreach_all_gather", 364),
                *BACKWARD,
            ),
            Kind.COLLECTIVE,
            "all_gather_single of FSDP",
        ),
        ((Frame(f"{TORCH}/distributed/_functional_collectives.py", "wait_tensor", 142),), Kind.COLLECTIVE, "wait_tensor"),
        ((Frame(f"{TORCH}/distributed/utils.py", "_verify_param_shape_across_processes", 286),), Kind.COLLECTIVE,
         "verify_param_shape_across_processes"),
        ((Frame(f"{TORCH}/utils/data/dataloader.py", "_MultiProcessingDataLoaderIter._try_get_data", 1),), Kind.LOADER,
         "a batch of the loader"),
        ((Frame(f"{TORCH}/cuda/__init__.py", "synchronize", 1),), Kind.DEVICE, "the device"),
        (BACKWARD, Kind.BACKWARD, ""),
        (
            (Frame("/lib/libtorch_cpu.so", "c10d::Reducer::finalize_backward", 0, True), *BACKWARD),
            Kind.COLLECTIVE,
            "all_reduce of DDP's gradients",
        ),
        ((Frame("/lib/libcudart.so", "cudaStreamSynchronize", 0, True),), Kind.DEVICE, "the device"),
        ((Frame("/opt/zhooks/cpu_transport/shared_memory.py", "_Waiting.wait", 261),
          Frame("/opt/zhooks/unit/flat.py", "Flat.finish_gather", 228)), Kind.COLLECTIVE, "gather"),
        ((), Kind.CODE, ""),
    ],
)  # fmt: skip
def test_what_a_stack_waits_in_is_known_by_the_calls_above_the_users(frames: Sequence[Frame], kind: Kind, name: str) -> None:
    place = place_of(stacks(*frames, MAIN, Frame("/home/me/train.py", "<module>", 70)))
    assert place is not None and (place.kind, place.name) == (kind, name)
    assert [frame.line for frame in place.frames] == [60, 70]


def test_a_wait_that_loops_in_a_library_stands_and_code_that_does_moves() -> None:
    polls = [Frame(f"{TORCH}/utils/data/dataloader.py", "_get_data", line) for line in (1, 2)]
    first, second = (place_of(stacks(frame, MAIN)) for frame in polls)
    assert first is not None and second is not None and first.mark == second.mark
    works = [Frame("/venv/lib/python3.11/site-packages/library.py", name, 1) for name in ("parse", "fill")]
    first, second = (place_of(stacks(frame, MAIN)) for frame in works)
    assert first is not None and second is not None and first.mark != second.mark


def test_hooks_of_autograds_own_thread_are_where_the_rank_is() -> None:
    hook = Thread("", 9, (Frame(C10D, "all_reduce", 1), Frame("/home/me/hooks.py", "reduce_now", 5)))
    begun = Thread("Thread-1", 8, (Frame("/usr/lib/python3.11/threading.py", "Thread._bootstrap", 1),))
    place = place_of(stacks(*BACKWARD, MAIN, others=(begun, hook)))
    assert place is not None and (place.kind, place.name) == (Kind.COLLECTIVE, "all_reduce")
    assert [frame.line for frame in place.frames] == [5, 60] and place.thread == "thread 9"


def test_what_runs_the_script_under_zprof_run_is_not_the_scripts() -> None:
    launch = Frame("/elsewhere/zprof/running/launch.py", "main", 146)
    place = place_of(stacks(MAIN, launch, Frame("<string>", "<module>", 1)))
    assert place is not None and place.frames == (MAIN,)
