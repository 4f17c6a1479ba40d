"""``zprof run --gather``: traces of hosts that share no folder come to rank 0, nothing waits for long, and nothing is lost."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked
from tests.support.slow import slow
from tests.support.zprof_command import Zprof
from tests.support.zprof_traces import sample_rows, write_trace
from zprof.running import gathering
from zprof.running.gathering import Meeting, gather, name_of_rank

#: For what does come.
PATIENCE_S = 300.0

Together = Callable[..., list[list[str]]]


@pytest.fixture
def together() -> Together:
    """Gathers the traces of ranks, each in a thread of its own, at a store as torchrun's agent keeps one."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(paths: dict[int, Path], *, world: int | None = None, patience_s: float = PATIENCE_S) -> list[list[str]]:
        said: dict[int, list[str]] = {}

        def one(rank: int) -> None:
            at = Meeting("127.0.0.1", store.port, "0", rank, world or len(paths))
            said[rank] = gather(at, paths[rank], patience_s)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in paths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        return [said[rank] for rank in paths]

    return run


def traces(folder: Path, world: int, *, steps: int = 3) -> dict[int, Path]:
    """A trace of each rank, in a folder of its own."""
    paths = {}
    for rank in range(world):
        (folder / f"host{rank}").mkdir()
        path = folder / f"host{rank}" / f"job7.{rank}.zprof"
        # A process each: so long as it is of one host, its number tells them apart.
        paths[rank] = write_trace(path, sample_rows(steps=steps), rank=rank, world=world, pid=100 + rank)
    return paths


# --- what comes together ----------------------------------------------------------------------------------------------


def test_traces_of_all_ranks_come_to_the_folder_of_rank_0_byte_by_byte(
    tmp_path: Path, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "CHUNK", 700)
    paths = traces(tmp_path, 4)
    first, *others = together(paths)
    assert len(first) == 1 and first[0].startswith(f"gathered 3 of 3 other ranks' traces in {tmp_path / 'host0'} (")
    assert others == [[], [], []]
    for rank in (1, 2, 3):
        came = tmp_path / "host0" / f"job7.{rank}.zprof"
        assert came.read_bytes() == paths[rank].read_bytes() and len(came.read_bytes()) > 3 * 700
        assert came.stat().st_mode & 0o777 == 0o600, "as a recording makes them"
    assert len(list((tmp_path / "host0").iterdir())) == 4, "and nothing else is left there"


def test_where_the_folder_is_shared_nothing_is_sent(tmp_path: Path, together: Together) -> None:
    paths = traces(tmp_path, 2)
    shared = tmp_path / "host0" / "job7.1.zprof"
    paths[1].rename(shared)
    before = shared.stat()
    first, second = together({0: paths[0], 1: shared})
    assert "gathered 0 of 1" in first[0] and first[0].endswith("; 1 were there already") and second == []
    assert (shared.stat().st_ino, shared.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_and_others_are_gathered(tmp_path: Path, together: Together) -> None:
    paths = traces(tmp_path, 4)
    del paths[2]
    (first, *others) = together(paths, world=4, patience_s=5.0)
    assert "gathered 2 of 3" in first[0] and first[1:] == ["not gathered: rank 2: nothing came from it for 5 s"]
    assert others == [[], []] and (tmp_path / "host0/job7.3.zprof").exists()


def test_ranks_whose_rank_0_is_gone_give_up_and_say_where_their_trace_is(tmp_path: Path, together: Together) -> None:
    paths = traces(tmp_path, 3)
    del paths[0]
    for (line,), rank in zip(together(paths, world=3, patience_s=0.5), (1, 2), strict=True):
        assert line.startswith("not gathered by rank 0: rank 0 has not asked for it") and line.endswith(str(paths[rank]))
        assert paths[rank].exists()


def test_where_nobody_keeps_a_store_any_more_it_is_one_line(tmp_path: Path) -> None:
    paths = traces(tmp_path, 2)
    for rank in (0, 1):
        (line,) = gather(Meeting("127.0.0.1", 1, "0", rank, 2), paths[rank], 0.5)
        assert line.startswith("traces are not gathered: ") and line.endswith(f"; that of rank {rank} is {paths[rank]}")
        assert "\n" not in line and len(line) < 400 + len(str(paths[rank]))


def test_a_store_that_is_silent_is_given_up_by_all_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers, as over a link that was cut; torch's client would read without end."""
    monkeypatch.setattr(gathering, "_CALL_S", 0.3)
    paths = traces(tmp_path, 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for rank in (0, 1):
            (line,) = gather(Meeting("127.0.0.1", port, "0", rank, 2), paths[rank], PATIENCE_S)
            assert re.search(rf"the store at 127\.0\.0\.1:{port} has not answered for \d+\.\d s; that of rank {rank} is", line)


@pytest.mark.parametrize("asked", ["set", *slow("check", "add")])
def test_a_store_that_falls_silent_between_ranks_is_given_up(
    asked: str, tmp_path: Path, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import PrefixStore

    over = threading.Event()
    monkeypatch.setattr(gathering, "_CALL_S", 0.5)
    monkeypatch.setattr(PrefixStore, asked, lambda *_: over.wait())
    first, second = together(traces(tmp_path, 2), patience_s=2.0)
    over.set()
    for said in (first, second):
        assert re.search(r"rank [01]: (the store at 127\.0\.0\.1:\d+ has not answered for|wait timeout)", "\n".join(said)), said


def test_what_cannot_be_kept_stays_where_it_is_and_both_ends_say_why(tmp_path: Path, together: Together) -> None:
    paths = traces(tmp_path, 4)
    there = tmp_path / "host0" / "job7.1.zprof"
    there.write_bytes(b"mine")
    paths[2].unlink()
    write_trace(paths[3].with_name("other.zprof"), sample_rows(), rank=7, world=9).rename(paths[3])
    first, second, third, fourth = together(paths)
    assert first[0].startswith("gathered 0 of 3") and first[1:] == [
        f"not gathered: rank 1: {there}: expected a trace of zprof, found something else; record one with zprof run",
        "not gathered: rank 2: it has no trace (No such file or directory)",
        "not gathered: rank 3: expected a trace of rank 3 of 4, found one of rank 7 of 9",
    ]
    assert there.read_bytes() == b"mine" and not list((tmp_path / "host0").glob(".*")) and len(first) == 4
    assert "expected a trace of zprof" in second[0] and "there is no trace" in third[0] and "found one of rank 7" in fourth[0]


def test_a_trace_that_is_too_large_is_refused_before_it_is_sent(
    tmp_path: Path, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "MOST_NBYTES", 1000)
    first, second = together(traces(tmp_path, 2))
    assert "is larger than 1000 B" in first[1] and "is larger than 1000 B" in second[0]
    assert os.listdir(tmp_path / "host0") == ["job7.0.zprof"]


def test_an_answer_that_comes_with_the_end_between_two_looks_is_heard(
    tmp_path: Path, together: Together, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks whether all is over looks at a store where rank 0 has ended."""
    from torch.distributed import PrefixStore

    asked, ended = threading.Event(), threading.Event()
    check, take_all = PrefixStore.check, gathering._take_all

    def looked(store: PrefixStore, keys: list[str]) -> bool:
        if keys == ["over"]:
            # Rank 1 has looked for its answer once, in vain.
            asked.set()
            assert ended.wait(300)
        return check(store, keys)

    def take(*args: Any) -> list[str]:
        assert asked.wait(300)
        said = take_all(*args)
        ended.set()
        return said

    monkeypatch.setattr(PrefixStore, "check", looked)
    monkeypatch.setattr(gathering, "_take_all", take)
    monkeypatch.setattr(gathering, "MOST_NBYTES", 1000)
    first, second = together(traces(tmp_path, 2))
    assert "is larger than 1000 B" in first[1] and "is larger than 1000 B" in second[0]


def test_names_are_those_that_a_shared_folder_would_have() -> None:
    assert name_of_rank(Path("runs/job7.0.zprof"), 0, 12) == Path("runs/job7.12.zprof")
    assert name_of_rank(Path("job7.3.restart2.zprof"), 3, 0) == Path("job7.0.restart2.zprof")
    assert name_of_rank(Path("job7.3.zprof"), 4, 0) is None and name_of_rank(Path("mine.zprof"), 0, 1) is None


# --- under zprof run --------------------------------------------------------------------------------------------------

#: Trains nothing: what is gathered is a trace as any.
SCRIPT = "import sys; print('ran'); sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)"


def test_ranks_of_a_launcher_gather_once_their_scripts_have_ended(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    for rank in range(2):
        (tmp_path / f"host{rank}").mkdir()
    words = ["-m", "zprof", "run", "--gather", "-o", "host{rank}/job7.{rank}.zprof", "script.py"]
    first, second = forked.launch(2, *words, at=tmp_path)
    assert (first.returncode, second.returncode, first.stdout) == (0, 0, "ran\n"), first.stderr + second.stderr
    assert "zprof: gathered 1 of 1 other ranks' traces in host0 (" in first.stderr
    assert "zprof: next: zprof report host0\n" in first.stderr, "after they are there"
    assert (tmp_path / "host0/job7.1.zprof").read_bytes() == (tmp_path / "host1/job7.1.zprof").read_bytes()


def test_where_a_script_failed_nobody_waits_for_its_trace(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["-m", "zprof", "run", "--gather", "-o", "job7.{rank}.zprof", "script.py", "3"]
    for rank, told in enumerate(forked.launch(2, *words, at=tmp_path)):
        where = tmp_path / f"job7.{rank}.zprof"
        assert told.returncode == 3
        assert f"zprof: traces are not gathered, because the script failed; that of rank {rank} is {where}" in told.stderr


def test_without_torchruns_store_it_is_refused_before_the_script_starts(zprof: Zprof, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("script.py").write_text("open('ran', 'w')")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    told = zprof("run", "--gather", "script.py")
    assert told.exit_code == 4 and told.stderr.count("\n") == 1
    assert "--gather: needs the store that torchrun's agent keeps, found none" in told.stderr
    named = zprof("run", "--gather", "-o", "mine-{rank}.zprof", "script.py")
    assert named.exit_code == 2 and "expected traces called <run>.<rank>.zprof, found mine-1.zprof" in named.stderr
    assert not Path("ran").exists()
    monkeypatch.delenv("RANK")
    alone = zprof("run", "--gather", "--nvml", "off", "script.py")
    assert alone.exit_code == 0 and Path("ran").exists() and "gathered" not in alone.stderr
