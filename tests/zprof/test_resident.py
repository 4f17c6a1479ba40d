"""What resident memory consists of: read from the kernel, glibc and CPython of this very process."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from zprof.recording.resident import ResidentSampler

MIB = 1 << 20


def sampled() -> dict[str, int]:
    return {what: value for what, key, value in ResidentSampler().sample()}


def test_the_parts_of_this_process_are_its_resident_memory() -> None:
    parts = sampled()
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    whole = sum(parts[what] for what in ("resident anonymous", "resident files", "resident shared"))
    assert abs(whole - pages) < 16 * MIB
    assert 0 < parts["library data"] < parts["resident anonymous"]


ALLOCATED_AND_FREED = """
from zprof.recording.resident import ResidentSampler

def sampled():
    return {what: value for what, key, value in ResidentSampler().sample()}

before = sampled()
blocks = [bytearray(100_000) for _ in range(500)]
held = sampled()
assert held["malloc used"] - before["malloc used"] >= 500 * 100_000
objects = [[number] for number in range(400_000)]
assert sampled()["python objects"] - held["python objects"] > 16 << 20
del blocks, objects
assert sampled()["malloc used"] < held["malloc used"]
"""


def test_malloc_and_python_say_what_was_allocated_and_freed() -> None:
    # In a process of its own: here, arenas that earlier tests left empty would take the objects in.
    ran = subprocess.run([sys.executable, "-c", ALLOCATED_AND_FREED], capture_output=True, text=True, check=False)
    assert not ran.returncode, ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is read from Linux's /proc")
def test_shared_memory_is_counted_once_it_is_touched() -> None:
    before = sampled()["resident shared"]
    with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * (32 * MIB))
        assert sampled()["resident shared"] - before >= 32 * MIB


def test_what_a_kernel_does_not_say_is_left_out(tmp_path: Path) -> None:
    names = [what for what, _, _ in ResidentSampler(tmp_path).sample()]
    assert "resident files" not in names
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "status").write_text("Name:\tx\nRssFile:\tmany kB\nRssShmem:\n")
    mapped = "7f00-7f01 rw-p 0 08:01 12 /usr/lib/x.so\nAnonymous: 8 kB\n"
    (proc / "smaps").write_text(f"{mapped}8000-8001 rw-p 0 0 0\nAnonymous: 4 kB\n")
    readings = {what: value for what, _, value in ResidentSampler(tmp_path).sample()}
    assert readings["library data"] == 8192 and "resident files" not in readings


def test_malloc_is_asked_once_a_second_and_mappings_once_in_ten() -> None:
    sampler = ResidentSampler()
    first, second = ([what for what, _, _ in sampler.sample()] for _ in range(2))
    assert {"malloc used", "library data"} <= set(first)
    assert not {"malloc used", "library data"} & set(second)
