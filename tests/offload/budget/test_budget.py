"""Budgets: the arithmetic of admission, and what a machine can hold before anything is asked of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.budget import Budget, Machine, Ranks, available, cannot_admit, kept_free, preflight
from offload.device.cpu import CpuDevice
from offload.errors import BudgetError
from offload.text import as_size
from offload.tier import Tier

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

# --- admission --------------------------------------------------------------------------------------------------------


def test_a_full_tier_refuses_with_its_arithmetic_and_counts_nothing() -> None:
    budget = Budget({HOST: 32 * GIB}, rank=3)
    budget.admit(HOST, "optim/layers.0", int(31.6 * GIB))
    with pytest.raises(BudgetError) as raised:
        budget.admit(HOST, "optim/layers.7", 512 * MIB)
    assert str(raised.value) == (
        "host tier cannot admit optim/layers.7 (512 MiB): 31.6 of 32.0 GiB in use, 102 MiB short on rank 3; "
        'raise [budget] host, or set [optimizer] tier = "disk"'
    )
    assert budget.used(HOST) == budget.high_water(HOST) == int(31.6 * GIB)


def test_what_is_lent_is_waited_for_and_never_counts_as_held() -> None:
    budget, admitted = Budget({HOST: 100}), threading.Event()
    budget.admit(HOST, "block", 60)
    budget.release(HOST, 20)
    with pytest.raises(BudgetError, match="60 of 100 B in use, 1 B short"):
        budget.lend(HOST, "snapshot", 41)
    budget.lend(HOST, "snapshot", 40)
    assert (budget.used(HOST), budget.high_water(HOST)) == (40, 60) and not budget.try_admit(HOST, 21)
    # Nobody gives anything back yet: to wait would be to wait for oneself.
    with pytest.raises(BudgetError, match="1 B short"):
        budget.admit(HOST, "more", 21)
    budget.hand_over(HOST)

    def admit() -> None:
        budget.admit(HOST, "more", 50)
        admitted.set()

    waiter = threading.Thread(target=admit)
    waiter.start()
    budget.give_back(HOST, 10)
    assert not admitted.is_set()
    budget.give_back(HOST, 30)
    waiter.join(60)
    assert admitted.is_set() and budget.used(HOST) == 90
    with pytest.raises(BudgetError, match="10 B short"):
        budget.admit(HOST, "too much", 20)


def test_each_tier_names_its_own_remedy() -> None:
    said = {tier: str(cannot_admit(tier, "k", 2, used=0, limit=1)) for tier in Tier}
    assert said[DEVICE] == (
        'device tier cannot admit k (2 B): 0 of 1 B in use, 1 B short; raise [budget] device, or set [optimizer] tier = "host"'
    )
    assert said[HOST].endswith('raise [budget] host, or set [optimizer] tier = "disk"')
    assert said[DISK].endswith("raise [budget] disk, or run on more ranks")


def test_a_refusal_by_a_byte_still_says_so() -> None:
    budget = Budget({DEVICE: 20 * GIB})
    budget.admit(DEVICE, "a", 20 * GIB)
    with pytest.raises(BudgetError, match=r"\(1 B\): 20\.0 of 20\.0 GiB in use, 1 B short;"):
        budget.admit(DEVICE, "b", 1)


def test_a_tier_without_a_limit_admits_everything_and_keeps_its_marks() -> None:
    budget = Budget({HOST: None})
    for tier in Tier:
        assert budget.limit(tier) is None
        budget.admit(tier, "a", TIB)
        budget.release(tier, TIB)
        assert (budget.used(tier), budget.high_water(tier)) == (0, TIB)


def test_tiers_do_not_share_a_budget() -> None:
    budget = Budget({DEVICE: 10, HOST: 10})
    budget.admit(DEVICE, "a", 10)
    budget.admit(HOST, "a", 10)
    assert (budget.used(DEVICE), budget.used(HOST), budget.used(DISK)) == (10, 10, 0)


def test_nothing_is_admitted_even_where_there_is_no_memory() -> None:
    budget = Budget({HOST: 0})
    budget.admit(HOST, "an empty shard", 0)
    assert not budget.try_admit(HOST, 1)


def test_releasing_what_was_not_admitted_is_noticed() -> None:
    budget = Budget({})
    budget.admit(HOST, "a", 10)
    with pytest.raises(AssertionError, match="host: 11 B released, 10 B were admitted"):
        budget.release(HOST, 11)
    with pytest.raises(AssertionError, match="host: -1 B released, 10 B were admitted"):
        budget.release(HOST, -1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40))), st.integers(0, 100))
def test_used_never_passes_the_limit_and_the_mark_is_the_most(moves: list[tuple[bool, int]], limit: int) -> None:
    budget, used, most = Budget({HOST: limit}), 0, 0
    for takes, nbytes in moves:
        if takes:
            fits = used + nbytes <= limit
            assert budget.try_admit(HOST, nbytes) is fits
            used += nbytes if fits else 0
        else:
            budget.release(HOST, min(used, nbytes))
            used -= min(used, nbytes)
        most = max(most, used)
        assert (budget.used(HOST), budget.high_water(HOST)) == (used, most)


def test_many_threads_are_counted_exactly() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        budget, admitted = Budget({HOST: 1000}), []

        def work() -> None:
            admitted.append(sum(budget.try_admit(HOST, 1) for _ in range(500)))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert sum(admitted) == budget.used(HOST) == 1000


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 * MIB, "512 MiB"),
        (20 * GIB, "20 GiB"),
        (33_930_000_000, "31.6 GiB"),
        (1000 * MIB, "1000 MiB"),
        (1023 * MIB + 1, "1023 MiB"),
        (5 * TIB // 2, "2.5 TiB"),
        (-3 * MIB, "-3 MiB"),
    ],
)
def test_sizes_are_shown_for_a_reader(nbytes: int, expected: str) -> None:
    assert as_size(nbytes) == expected


# --- a machine on paper -----------------------------------------------------------------------------------------------

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max data size             {data:<20} unlimited            bytes
Max stack size            8388608              unlimited            bytes
Max open files            20000                20000                files
Max locked memory         {lock:<20} unlimited            bytes
Max address space         {space:<20} unlimited            bytes
"""
STATUS = """\
Name:	python
VmPeak:	 2097152 kB
VmSize:	 1048576 kB
VmLck:	    1024 kB
VmPin:	    3072 kB
VmRSS:	  400000 kB
VmData:	  524288 kB
CapEff:	{capabilities}
"""
MEMINFO = "MemTotal:       64000000 kB\nMemFree:         1000000 kB\nMemAvailable:   33554432 kB\nHugePages_Total:       0\n"

V2_MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
40 27 0:40 / /scratch\\040space rw - tmpfs tmpfs rw,size=1g
"""
V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
33 31 0:30 /docker/4f2a /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory
38 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


class Paper:
    """A root folder as a kernel would fill it; nothing bounds it but the 32 GiB available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.machine = Machine(root)
        self.write("proc/meminfo", MEMINFO)
        self.process()

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def process(
        self, *, data: str = "unlimited", lock: str = "unlimited", space: str = "unlimited", capabilities: str = "0" * 16
    ) -> None:
        self.write("proc/self/limits", LIMITS.format(data=data, lock=lock, space=space))
        self.write("proc/self/status", STATUS.format(capabilities=capabilities))

    def cgroup2(self, levels: dict[str, tuple[str, int, int]]) -> None:
        """Levels from the process's own up: path -> memory.max, bytes in use, bytes of page cache among them."""
        self.write("proc/self/mountinfo", V2_MOUNTS)
        self.write("proc/self/cgroup", f"0::{next(iter(levels))}\n")
        for path, (limit, usage, cache) in levels.items():
            folder = f"sys/fs/cgroup{path}"
            self.write(f"{folder}/memory.max", f"{limit}\n")
            self.write(f"{folder}/memory.current", f"{usage}\n")
            self.write(f"{folder}/memory.stat", f"anon 77\nfile 999999\ninactive_file {cache}\nactive_file 0\n")

    def cgroup1(self, limit: int, usage: int, cache: int, below: str = "") -> None:
        """The container's cgroup, or the one ``below`` it, seen where the container's own part of the tree is mounted."""
        self.write("proc/self/mountinfo", V1_MOUNTS)
        path = f"/docker/4f2a{below}"
        self.write("proc/self/cgroup", f"9:name=systemd:{path}\n4:cpu,cpuacct:{path}\n3:memory:{path}\n0::/\n")
        self.write(f"sys/fs/cgroup/memory{below}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"sys/fs/cgroup/memory{below}/memory.usage_in_bytes", f"{usage}\n")
        stat = f"cache 5\ninactive_file 1\nhierarchical_memory_limit 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
        self.write(f"sys/fs/cgroup/memory{below}/memory.stat", stat)

    def free(self, pinned: bool = False) -> int:
        return available(HOST, machine=self.machine, pinned=pinned)

    def refusal(self, need: dict[Tier, int], ranks: int = 1, pinned: bool = False) -> str:
        with pytest.raises(BudgetError) as raised:
            preflight(need, ranks=Ranks(ranks, ranks), pinned=pinned, machine=self.machine)
        return str(raised.value)


@pytest.fixture
def paper(tmp_path: Path) -> Paper:
    return Paper(tmp_path)


def test_available_memory_bounds_where_nothing_else_does(paper: Paper) -> None:
    assert paper.free() == 32 * GIB
    preflight({HOST: 32 * GIB}, machine=paper.machine)
    assert paper.refusal({HOST: 33 * GIB}) == (
        "preflight expected host memory for 33 GiB per rank (host 33 GiB); available memory (MemAvailable) leaves 32 GiB, "
        '1 GiB short; end other processes or add memory, or lower [budget], or set tier = "disk" with a [disk] path on a disk'
    )


def test_a_cgroup_bounds_by_what_it_has_left(paper: Paper) -> None:
    paper.cgroup2({"/job/step": (str(8 * GIB), 3 * GIB, 1 * GIB)})
    assert paper.free() == 6 * GIB, "page cache among the use is given up before anybody is killed"
    preflight({HOST: 6 * GIB}, machine=paper.machine)
    assert paper.refusal({HOST: 6 * GIB + MIB}).startswith(
        "preflight expected host memory for 6 GiB per rank (host 6 GiB); "
        "cgroup /sys/fs/cgroup/job/step (limit 8 GiB, 2 GiB in use) leaves 6 GiB, 1 MiB short; raise the container's"
    )


def test_the_tightest_cgroup_above_the_process_counts(paper: Paper) -> None:
    levels = {
        "/user/job/step": ("max", 1 * GIB, 0),
        "/user/job": (str(16 * GIB), 1 * GIB, 0),
        "/user": (str(12 * GIB), 11 * GIB, 0),
    }
    paper.cgroup2(levels)
    assert paper.free() == 1 * GIB
    assert "cgroup /sys/fs/cgroup/user (limit 12 GiB" in paper.refusal({HOST: 2 * GIB})


def test_a_cgroup_over_its_limit_leaves_nothing(paper: Paper) -> None:
    paper.cgroup2({"/job": (str(1 * GIB), 2 * GIB, 0)})
    assert paper.free() == 0
    assert "leaves 0 B, 1 GiB short;" in paper.refusal({HOST: 1})


def test_version_1_is_read_where_a_container_mounts_its_own_part(paper: Paper) -> None:
    paper.cgroup1(4 * GIB, 2 * GIB, 1 * GIB)
    assert paper.free() == 3 * GIB
    assert "cgroup /sys/fs/cgroup/memory (limit 4 GiB, 1 GiB in use)" in paper.refusal({HOST: 4 * GIB})


def test_version_1_is_read_below_what_a_container_mounts(paper: Paper) -> None:
    paper.cgroup1(4 * GIB, 2 * GIB, 1 * GIB)
    paper.cgroup1(2 * GIB, 1 * GIB, 0, below="/job")
    assert paper.free() == 1 * GIB
    assert "cgroup /sys/fs/cgroup/memory/job (limit 2 GiB" in paper.refusal({HOST: 2 * GIB})


def test_version_1_without_a_limit_is_no_bound(paper: Paper) -> None:
    paper.cgroup1(9223372036854771712, 2 * GIB, 0)
    assert paper.free() == 32 * GIB
    assert not [bound for bound in paper.machine.memory_bounds() if bound.name.startswith("cgroup")]


def test_a_cgroup_outside_what_the_namespace_shows_is_bound_by_what_it_shows(paper: Paper) -> None:
    paper.cgroup2({"/": (str(4 * GIB), 1 * GIB, 0)})
    paper.write("proc/self/cgroup", "0::/../../elsewhere\n")
    assert paper.free() == 3 * GIB


def test_address_space_bounds_by_what_is_not_mapped_yet(paper: Paper) -> None:
    paper.process(space=str(5 * GIB))
    assert paper.free() == 4 * GIB
    assert "RLIMIT_AS (limit 5 GiB, 1 GiB in use) leaves 4 GiB, 1 GiB short; raise it with ulimit -v unlimited" in (
        paper.refusal({HOST: 5 * GIB})
    )


def test_data_size_bounds_private_memory(paper: Paper) -> None:
    paper.process(data=str(2 * GIB))
    assert paper.free() == 2 * GIB - 512 * MIB
    assert "RLIMIT_DATA" in paper.refusal({HOST: 2 * GIB})


def test_locked_memory_bounds_only_what_is_locked(paper: Paper) -> None:
    paper.process(lock=str(8 * MIB))
    assert paper.free() == 32 * GIB
    assert paper.free(pinned=True) == 4 * MIB
    preflight({HOST: GIB}, machine=paper.machine)
    said = paper.refusal({HOST: GIB}, pinned=True)
    assert "RLIMIT_MEMLOCK (limit 8 MiB, 4 MiB in use) leaves 4 MiB" in said
    assert "ulimit -l unlimited (docker run --ulimit memlock=-1)" in said


def test_a_process_that_may_lock_all_is_not_bound(paper: Paper) -> None:
    paper.process(lock="65536", capabilities="0000000000004000")
    assert paper.free(pinned=True) == 32 * GIB
    paper.process(lock="65536", capabilities="000001ffffffbfff")
    assert paper.free(pinned=True) == 0


def test_on_a_cpu_device_and_host_are_summed(paper: Paper) -> None:
    preflight({DEVICE: 16 * GIB, HOST: 16 * GIB}, machine=paper.machine)
    said = paper.refusal({DEVICE: 20 * GIB, HOST: 13 * GIB})
    assert "host memory for 33 GiB per rank (device 20 GiB + host 13 GiB)" in said


def test_ranks_of_one_machine_share_its_memory_but_not_their_own_limits(paper: Paper) -> None:
    preflight({HOST: 8 * GIB}, ranks=Ranks(4, 4), machine=paper.machine)
    assert "expected host memory for 8 GiB per rank (host 8 GiB), 40 GiB for 5 ranks; available" in (
        paper.refusal({HOST: 8 * GIB}, ranks=5)
    )
    paper.process(space=str(10 * GIB))
    preflight({HOST: 8 * GIB}, ranks=Ranks(4, 4), machine=paper.machine)


def test_containers_of_one_machine_share_its_memory_but_not_their_own_limits(paper: Paper) -> None:
    paper.cgroup2({"/": (str(8 * GIB), 2 * GIB, 0)})
    two_of_four = Ranks(machine=4, container=2)
    preflight({HOST: 3 * GIB}, ranks=two_of_four, machine=paper.machine)
    assert available(HOST, ranks=two_of_four, machine=paper.machine) == 3 * GIB
    with pytest.raises(BudgetError, match=r"8 GiB for 2 ranks; cgroup .* leaves 6 GiB, 2 GiB short"):
        preflight({HOST: 4 * GIB}, ranks=two_of_four, machine=paper.machine)
    assert available(HOST, ranks=Ranks(machine=16, container=1), machine=paper.machine) == 2 * GIB


def test_processes_of_a_machine_say_the_same_of_it_and_those_of_another_container_differ(tmp_path: Path) -> None:
    one, other, elsewhere = (Paper(tmp_path / name) for name in ("one", "other", "elsewhere"))
    for paper, boot, root in ((one, "1234", "/docker/a"), (other, "1234", "/docker/b"), (elsewhere, "5678", "/docker/a")):
        paper.write("proc/sys/kernel/random/boot_id", f"{boot}\n")
        paper.write("proc/self/mountinfo", f"30 20 0:26 {root} /sys/fs/cgroup rw - cgroup2 cgroup rw\n")
    assert one.machine.places()[0] == other.machine.places()[0] != elsewhere.machine.places()[0]
    assert len({paper.machine.places()[1] for paper in (one, other, elsewhere)}) == 3


def test_files_in_memory_are_memory(paper: Paper) -> None:
    number = paper.root.stat().st_dev
    mounts = V2_MOUNTS + "50 27 {} / {} rw - {} x rw\n"
    here = f"{os.major(number)}:{os.minor(number)}"
    need, folder = {HOST: 32 * GIB, DISK: 1}, paper.root / "not" / "yet"
    for device, kind in ((here, "ext4"), ("999:9", "tmpfs")):
        paper.write("proc/self/mountinfo", mounts.format(device, "/", kind))
        assert not paper.machine.is_memory(folder)
        preflight(need, folder=folder, machine=paper.machine)
    paper.write("proc/self/mountinfo", mounts.format(here, "/", "tmpfs"))
    assert paper.machine.is_memory(folder)
    with pytest.raises(BudgetError, match=r"\(host 32 GiB \+ disk 1 B, as .*/not/yet is in memory\)"):
        preflight(need, folder=folder, machine=paper.machine)


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="this machine mounts no /dev/shm")
def test_shared_memory_is_memory_and_the_repository_is_not() -> None:
    assert Machine().is_memory(Path("/dev/shm/zhooks/not yet"))
    assert not Machine().is_memory(Path("/proc"))


def test_a_machine_that_says_nothing_is_asked_through_psutil(tmp_path: Path) -> None:
    free = available(HOST, machine=Machine(tmp_path / "nothing here"))
    assert abs(free - psutil.virtual_memory().available) < GIB


@given(st.text(), st.sampled_from(["mountinfo", "cgroup", "limits", "status"]))
def test_unreadable_facts_never_stop_a_run(text: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paper = Paper(Path(folder))
        paper.write(f"proc/self/{name}", text)
        assert 0 <= paper.free(pinned=True) <= 32 * GIB


# --- this machine -----------------------------------------------------------------------------------------------------


class Remote(CpuDevice):
    """A device with memory of its own, as far as budgets look at one."""

    def __init__(self, free: int, total: int) -> None:
        super().__init__(torch.device("cpu"), addresses_host=False)
        self.device = torch.device("cuda", 0)
        self.has = free, total

    def memory(self) -> tuple[int, int]:
        return self.has


def test_a_device_with_memory_of_its_own_is_bound_by_it_alone(paper: Paper) -> None:
    device = Remote(10 * GIB, 16 * GIB)
    assert available(DEVICE, device, machine=paper.machine) == 10 * GIB
    preflight({DEVICE: 10 * GIB, HOST: 30 * GIB}, device=device, machine=paper.machine)
    with pytest.raises(BudgetError) as raised:
        preflight({DEVICE: 11 * GIB}, device=device, machine=paper.machine)
    assert str(raised.value) == (
        "preflight expected device memory for 11 GiB per rank; device cuda:0 (16 GiB in all) leaves 10 GiB, 1 GiB short; "
        'end other processes on it, or lower [budget] device, or set tier = "host"'
    )
    device.close()


def test_a_cpu_device_has_what_the_host_has() -> None:
    device = CpuDevice(torch.device("cpu"), True)
    of_device, of_host = available(DEVICE, device), available(HOST, device)
    assert abs(of_device - of_host) < GIB
    assert 0 < of_host <= psutil.virtual_memory().total
    device.close()


def test_free_disk_bounds_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    free = available(DISK, folder=folder)
    there = psutil.disk_usage(str(tmp_path))
    assert abs(free + kept_free(there.total) - there.free) < GIB
    preflight({DISK: 1 * MIB}, folder=folder, ranks=Ranks(2, 1))
    with pytest.raises(BudgetError) as raised:
        preflight({DISK: 1 << 60}, folder=folder, ranks=Ranks(2, 1))
    said = str(raised.value)
    assert said.startswith(
        f"preflight expected disk for {as_size(1 << 60)} per rank, {as_size(1 << 61)} for 2 ranks; free space in {folder}"
    )
    assert said.endswith("short; free some space, or point [disk] path at a larger disk, or lower [budget] disk")
    assert not folder.exists(), "a refusal, like a question, leaves nothing behind"


def test_this_machine_refuses_what_no_machine_has() -> None:
    preflight({DEVICE: 1 * MIB, HOST: 1 * MIB})
    with pytest.raises(BudgetError, match=r"^preflight expected host memory for 1048576 TiB"):
        preflight({HOST: 1 << 60})


def test_nothing_needed_is_never_refused_even_where_nothing_is_left(paper: Paper) -> None:
    paper.cgroup2({"/job": (str(1 * GIB), 2 * GIB, 0)})
    full = Remote(0, 8 * GIB)
    for need in ({}, dict.fromkeys(Tier, 0)):
        preflight(need, device=full, ranks=Ranks(2, 2), pinned=True, machine=paper.machine)
    for tier, name in ((HOST, "host memory"), (DEVICE, "device memory")):
        with pytest.raises(BudgetError, match=f"^preflight expected {name} for 1 B per rank.* leaves 0 B"):
            preflight({tier: 1}, device=full, machine=paper.machine)


def test_the_limits_of_this_process_are_the_ones_its_kernel_keeps() -> None:
    check = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))\n"
        "from offload.budget import Machine\n"
        "said = [bound for bound in Machine().memory_bounds() if bound.name.startswith('RLIMIT_AS')]\n"
        "assert len(said) == 1, said\n"
        "assert 0 < (1 << 36) - said[0].free < 1 << 34 and said[0].of_process, said\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_a_cgroup_of_this_process_is_seen_as_the_kernel_shows_it() -> None:
    bounds = [bound for bound in Machine().memory_bounds() if bound.name.startswith("cgroup")]
    if not bounds:
        pytest.skip("no cgroup bounds the memory of this process")
    for bound in bounds:
        found = re.match(r"cgroup (\S+) \(limit (.+), .+ in use\)", bound.name)
        assert found is not None
        limits = [file for name in ("memory.max", "memory.limit_in_bytes") if (file := Path(found[1]) / name).exists()]
        assert [as_size(int(file.read_text())) for file in limits] == [found[2]]


def test_budgets_start_without_torch() -> None:
    check = "import sys, offload.budget; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_a_soft_limit_on_locked_memory_bounds_whoever_may_not_lock_at_will() -> None:
    check = (
        "import json, resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (3 << 20, 3 << 20))\n"
        "from offload.budget import Machine\n"
        "capable = [line for line in open('/proc/self/status') if line.startswith('CapEff')][0].split()[1]\n"
        "names = [bound.name for bound in Machine().memory_bounds(pinned=True) if 'MEMLOCK' in bound.name]\n"
        "print(json.dumps([int(capable, 16), names]))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=600, check=True)
    capabilities, names = json.loads(done.stdout)
    if capabilities >> 14 & 1:  # CAP_IPC_LOCK
        assert names == []
    else:
        assert len(names) == 1 and "limit 3 MiB" in names[0]
