"""NVML is read through the real bindings, against a library that answers as NVML documents, and as it should not."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import CapabilityError
from tests.support.fake_nvml import ALL, CLOSE, MIB, MINE, SAMPLE, STATE, Slots, build, drive, environment
from tests.support.paths import ROOT
from zprof.gpu.answers import Unbelievable
from zprof.gpu.counters import Total
from zprof.gpu.devices import Device, visible_devices
from zprof.gpu.sampling import open_gpus
from zprof.gpu.vendors import throttles
from zprof.recording import surroundings
from zprof.recording.sampler import ProcessSampler, ReplaySampler, TorchSampler, cgroup_folder, process_samplers, torch_uuids

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


def asked(library: Path, folder: Path, values: Mapping[str, int], *script: Mapping[str, Any], **more: str) -> list[Any]:
    slots = folder / "slots"
    Slots(slots, values)
    return drive(library, slots, script, **more)


# --- what answers -----------------------------------------------------------------------------------------------------


def test_every_quantity_comes_in_the_unit_of_its_name(library: Path, tmp_path: Path) -> None:
    grown = {"set": {"pcie_tx": 11_000, "pcie_rx": 22_000, "nvlink_tx": 1810, "nvlink_rx": 3620, "energy": 5_000_123}}
    opened, _, sample = asked(library, tmp_path, {"reasons": 0x44}, MINE, grown, SAMPLE)
    assert opened["state"] == "ok" and opened["why"] == "" and opened["driver"] == "570.12.34"
    del sample["seconds"]
    assert sample == {
        "gpu0 nvml memory used": 1000 * MIB,
        "gpu0 nvml utilisation": 37,
        "gpu0 nvml power": 251_000,
        "gpu0 nvml temperature": 41,
        "gpu0 nvml sm clock": 1980,
        "gpu0 nvml memory clock": 3201,
        "gpu0 nvml throttle": 0x44,
        "gpu0 nvml energy": 123,
        "gpu0 nvml pcie tx": 1000,
        "gpu0 nvml pcie rx": 2000,
        # KiB, and of all links: a bare field number would ask for the first link, an eighteenth of it.
        "gpu0 nvml nvlink tx": 10 * 1024,
        "gpu0 nvml nvlink rx": 20 * 1024,
    }
    assert opened["sources"]["nvml pcie"] == "fields 197/198"
    assert throttles(0x44) == ["power cap", "heat (hardware)"] and throttles(1) == []


def test_an_older_driver_is_asked_by_its_older_functions(tmp_path: Path) -> None:
    old = build(tmp_path / "old", "MEMORY_V2", "EVENT_REASONS", "TEMPERATURE_V", "FIELDS", "GPM", "MIG")
    opened, sample, state, _ = asked(old, tmp_path, {"block_us": 100}, MINE, SAMPLE, STATE, CLOSE)
    assert opened["sources"] == {
        "nvml memory used": "nvmlDeviceGetMemoryInfo (with what the driver keeps)",
        "nvml utilisation": "nvmlDeviceGetUtilizationRates",
        "nvml power": "nvmlDeviceGetPowerUsage",
        "nvml temperature": "nvmlDeviceGetTemperature",
        "nvml sm clock": "nvmlDeviceGetClockInfo",
        "nvml memory clock": "nvmlDeviceGetClockInfo",
        "nvml throttle": "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvml energy": "nvmlDeviceGetTotalEnergyConsumption",
        "nvml pcie": "nvmlDeviceGetPcieThroughput (20 ms windows x time)",
    }
    assert sample["gpu0 nvml power"] == 250_000
    assert "function not in this driver" in state["dropped"]["gpu0 nvml nvlink"]


def test_a_quantity_that_fails_is_dropped_with_its_reason_and_the_others_go_on(library: Path, tmp_path: Path) -> None:
    fails = {"set": {"ret_energy": 4, "ret_clock": 999, "utilisation": 4_000_000_000}}
    script = [MINE, SAMPLE, fails, SAMPLE, SAMPLE, SAMPLE, STATE, {"set": {"ret_energy": 0}}, SAMPLE]
    answers = asked(library, tmp_path, {}, *script)
    before, after, state = answers[1], answers[-1], answers[6]
    gone = {"gpu0 nvml energy", "gpu0 nvml sm clock", "gpu0 nvml memory clock", "gpu0 nvml utilisation"}
    assert set(before) - set(after) == gone
    assert state["state"] == "ok"
    assert state["dropped"] == {
        "gpu0 nvml energy": "no permission",
        "gpu0 nvml sm clock": "unknown error",
        "gpu0 nvml memory clock": "unknown error",
        "gpu0 nvml utilisation": "answered 4000000000 %, expected 0 to 100",
    }


def test_one_bad_answer_is_left_out_and_the_next_one_counts(library: Path, tmp_path: Path) -> None:
    bad, good = {"set": {"ret_clock": 10, "memory_used": 2**60}}, {"set": {"ret_clock": 0, "memory_used": 5 * MIB}}
    _, _, during, _, after, state = asked(library, tmp_path, {}, MINE, bad, SAMPLE, good, SAMPLE, STATE)
    assert "gpu0 nvml memory used" not in during and "gpu0 nvml sm clock" not in during
    assert after["gpu0 nvml memory used"] == 5 * MIB and after["gpu0 nvml sm clock"] == 1980
    assert state["dropped"] == {}


# --- bytes over the buses ---------------------------------------------------------------------------------------------


def test_a_counter_of_32_bits_is_followed_over_its_wrap(library: Path, tmp_path: Path) -> None:
    near = 2**32 - 1000
    wrapped = [{"set": {"pcie_rx": near + 10}}, {"set": {"pcie_tx": 500}}, {"until": {"gpu0 nvml pcie tx": 1500}}]
    values = {"pcie_type": 1, "pcie_tx": near, "pcie_rx": near}
    _, first, _, _, _, second = asked(library, tmp_path, values, MINE, SAMPLE, *wrapped, SAMPLE)
    assert first["gpu0 nvml pcie tx"] == 0
    assert (second["gpu0 nvml pcie tx"], second["gpu0 nvml pcie rx"]) == (1500, 10)


def test_a_counter_of_32_bits_is_read_more_often_than_it_can_wrap(library: Path, tmp_path: Path) -> None:
    # Every reading finds half a wrap more, so the total shows how often it was read without anybody sampling.
    # The fifth reading, of which the opening makes one, begins when three of the others are in the total.
    script = [MINE, {"until": {"pcie_tx": 5 * 2**30}}, SAMPLE, CLOSE]
    values = {"pcie_type": 1, "pcie_step": 2**30, "link_generation": 5}
    opened, _, sample, left = asked(library, tmp_path, values, *script)
    assert opened["sources"]["nvml pcie"] == "fields 197/198"
    assert sample["gpu0 nvml pcie tx"] >= 3 * 2**30
    assert left == ["MainThread"]


def test_hopper_without_the_fields_is_read_through_gpm(library: Path, tmp_path: Path) -> None:
    script = [MINE, {"wait": 0.2}, SAMPLE, {"wait": 0.2}, SAMPLE, STATE, CLOSE, {"get": ["gpm_held", "shutdowns"]}]
    answers = asked(library, tmp_path, {"ret_pcie": 3, "ret_nvlink": 3}, *script)
    assert answers[0]["sources"]["nvml pcie"] == "GPM 20/21 (rate x time)"
    assert answers[0]["sources"]["nvml nvlink"] == "GPM 61/60 (rate x time)"
    sent, received = (answers[4][f"gpu0 nvml {bus}"] for bus in ("pcie tx", "pcie rx"))
    assert sent >= 100 * MIB * 0.4 and abs(received - 2 * sent) <= 2
    assert answers[-1] == {"gpm_held": 0, "shutdowns": 1}


def test_the_call_that_blocks_never_delays_the_other_samples(library: Path, tmp_path: Path) -> None:
    block_us = 200_000
    # Two calls a reading; the third reading begins when the first two are in the total.
    script = [MINE, *[SAMPLE] * 50, {"until": {"throughput_calls": 6}}, SAMPLE, CLOSE, {"get": ["shutdowns"]}]
    values = {"ret_pcie": 3, "gpm": 0, "block_us": block_us}
    answers = asked(library, tmp_path, values, *script)
    assert answers[0]["sources"]["nvml pcie"] == "nvmlDeviceGetPcieThroughput (20 ms windows x time)"
    # Of samples that each waited for one blocking call, half would not be quicker than it; a busy machine delays a few.
    assert statistics.median(sample["seconds"] for sample in answers[1:51]) < block_us / 1e6 / 2
    assert answers[-1]["shutdowns"] == 1
    assert 0 < answers[-3]["gpu0 nvml pcie tx"] <= 1000 * 1000 * 10
    assert answers[-2] == ["MainThread"]


def test_a_source_that_fails_gives_way_to_the_next_and_the_total_goes_on(library: Path, tmp_path: Path) -> None:
    script = [MINE, {"set": {"pcie_tx": 60_000}}, SAMPLE, {"set": {"ret_pcie": 3}}, SAMPLE, {"wait": 0.2}, SAMPLE, STATE]
    answers = asked(library, tmp_path, {"pcie_tx": 10_000}, *script)
    assert answers[2]["gpu0 nvml pcie tx"] == answers[4]["gpu0 nvml pcie tx"] == 50_000
    assert answers[6]["gpu0 nvml pcie tx"] > 50_000
    assert answers[-1]["sources"]["nvml pcie"] == "GPM 20/21 (rate x time)"


@given(steps=st.lists(st.integers(0, 2**31), max_size=50), start=st.integers(0, 2**32 - 1), wide=st.booleans())
def test_a_total_is_the_sum_of_the_steps_over_any_number_of_wraps(steps: list[int], start: int, wide: bool) -> None:
    total, raw = Total(), start
    total.advance(raw, 2**32)
    for step in steps:
        raw = (raw + step) % 2**32
        # A type that says 64 bits and wraps at 32 is told from a reset where it fell from its upper half.
        total.advance(raw, 2**64 if wide and step < 2**30 and (raw >= step or raw < 2**31) else 2**32)
    assert total.value == sum(steps)


def test_a_counter_that_was_reset_loses_one_difference_and_a_jump_is_not_believed() -> None:
    total = Total(scale=1024)
    assert [total.advance(raw) for raw in (2**40, 2**40 + 2, 5, 8)] == [0, 2048, 0, 3072]
    assert (total.value, total.lost) == (5120, 1)
    with pytest.raises(Unbelievable):
        total.advance(2**62, most=10**15)
    assert total.advance(2**62 + 1, most=10**15) == 1024 and total.lost == 2


# --- states -----------------------------------------------------------------------------------------------------------


def test_nvml_that_does_not_serve_is_a_state_of_one_line(library: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, int], str, str]] = [
        ({"ret_init": 9}, "no driver", "driver not loaded"),
        ({"ret_init": 4}, "no permission", "no permission"),
        ({"ret_init": 18}, "mismatch", "driver and library versions differ"),
        ({"ret_init": 12345}, "failed", "NVML error 12345"),
        ({"ret_count": 15}, "lost", "GPU is lost"),
        ({"count": 0}, "no devices", "no devices"),
        ({"unreachable": 1}, "lost", "GPU is lost"),
        ({"lost": 1}, "lost", "GPU is lost"),
    ]
    script = [step for values, *_ in cases for step in ({"set": {**Slots.defaults, **values}}, MINE, SAMPLE, CLOSE)]
    answers = asked(library, tmp_path, {}, *script)
    for place, (values, state, said) in enumerate(cases):
        opened, sample = answers[4 * place + 1 : 4 * place + 3]
        assert opened["state"] == state and said in opened["why"] and opened["why"].isprintable(), values
        assert set(sample) == {"seconds"}, values


def test_without_the_library_the_state_is_absent_and_the_bindings_are_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from zprof.gpu.sampling import open_gpus; s = open_gpus(); print(s.state()['state'], s.sample(), s.why);"
        "s.close(); print('pynvml' in sys.modules, 'torch' in sys.modules)"
    )
    # A file that is no library hides the one a machine with a driver has.
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=environment(tmp_path, tmp_path / "x")
    )
    first, second = done.stdout.splitlines()
    assert not done.stderr and first.startswith("absent () no NVML: ") and second == "False False"


def test_a_gpu_that_is_lost_is_told_and_its_neighbour_goes_on(library: Path, tmp_path: Path) -> None:
    script = [ALL, SAMPLE, {"set": {"lost": 1}}, SAMPLE, SAMPLE, STATE, {"set": {"lost": 0}}, SAMPLE, CLOSE, STATE]
    answers = asked(library, tmp_path, {"count": 2}, *script)
    assert {key[:4] for key in answers[1] if key != "seconds"} == {"gpu0", "gpu1"}
    assert {key[:4] for key in answers[4] if key != "seconds"} == {"gpu1"}
    assert answers[5]["state"] == "ok" and answers[5]["notes"] == ["gpu0 (Fake H200): GPU is lost"]
    assert answers[5]["devices"][0]["lost"] == "GPU is lost"
    # The last note, written after the end, still tells all of it.
    assert answers[-1]["notes"] == answers[5]["notes"] and answers[-1]["sources"]


def test_recording_that_insists_on_nvml_is_refused_without_it(library: Path, tmp_path: Path) -> None:
    code = "from zprof.gpu.sampling import open_gpus; open_gpus(required=True)"
    Slots(tmp_path / "slots", {"ret_init": 9})
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(library, tmp_path / "slots"),
    )
    assert done.returncode == 1
    expected = "nvml: expected a GPU that NVML, AMD SMI or Level Zero shows, found no driver"
    assert f"{CapabilityError.__name__}: {expected}" in done.stderr


@pytest.mark.parametrize("cases", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_answers_give_a_right_reading_or_a_state_of_one_line(library: Path, tmp_path: Path, cases: int) -> None:
    Slots(tmp_path / "slots")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.fake_nvml.fuzz", str(cases), "7"],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env=environment(library, tmp_path / "slots"),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["cases"] == cases and not done.stderr
    # It reached every kind of end, and mostly the samples.
    assert {"ok", "no driver", "no permission", "no devices", "lost", "failed"} <= set(told["states"])
    assert told["states"]["ok"] > cases / 2 and told["readings"] > cases


# --- devices ----------------------------------------------------------------------------------------------------------


def test_a_process_sees_its_devices_by_the_numbers_cuda_gives_them(library: Path, tmp_path: Path) -> None:
    (opened, sample) = asked(library, tmp_path, {"count": 3}, MINE, SAMPLE, CUDA_VISIBLE_DEVICES="2,0")
    assert [(device["key"], device["label"]) for device in opened["devices"]] == [("gpu0", "2"), ("gpu1", "0")]
    assert sample["gpu0 nvml memory used"] == 1002 * MIB and sample["gpu1 nvml memory used"] == 1000 * MIB


def uuid(gpu: int) -> str:
    """As CUDA says it, without what NVML puts before it."""
    return f"{gpu:08d}-0000-0000-0000-000000000000"


def test_devices_are_keyed_anew_when_cuda_begins_to_run(library: Path, tmp_path: Path) -> None:
    """The script says which devices it takes after the recording began, e.g. CUDA_VISIBLE_DEVICES by its rank."""
    before, _, _, after, state, again = asked(
        library, tmp_path, {"count": 3}, MINE, SAMPLE, {"cuda": [uuid(2)]}, SAMPLE, STATE, SAMPLE
    )
    assert [device["label"] for device in before["devices"]] == ["0", "1", "2"]
    assert after["gpu0 nvml memory used"] == again["gpu0 nvml memory used"] == 1002 * MIB
    assert not any(name.startswith("gpu1") for name in after)
    assert [(device["key"], device["label"]) for device in state["devices"]] == [("gpu0", "2")]
    until = "until then by the bus: gpu0 0, gpu1 1, gpu2 2"
    assert state["notes"] == [f"keys corrected when torch began to compute on them; {until}"]


def test_of_the_ranks_of_a_host_one_samples_each_gpu(library: Path, tmp_path: Path) -> None:
    """Each rank sees every GPU until its CUDA runs; then the first keeps its own, and the others sample theirs."""
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": f"{tmp_path}"}
    steps = [MINE, MINE, {"use": 0}, SAMPLE, {"use": 1}, SAMPLE, STATE]
    steps += [{"cuda": [uuid(1)]}, SAMPLE, {"use": 0}, {"cuda": [uuid(0)]}, SAMPLE, {"use": 1}, SAMPLE, {"use": 0}, SAMPLE]
    answers = asked(library, tmp_path, {"count": 2}, *steps, **rank)
    first, second, state, early, narrowed, taken, last = (answers[place] for place in (3, 5, 6, 8, 11, 13, 15))
    energy = ("gpu0 nvml energy", "gpu1 nvml energy")
    assert [name in first for name in energy] == [True, True]
    assert set(second) == {"seconds"} and state["state"] == "ok"
    assert [note for note in state["notes"] if note.endswith("sampled by another rank of this job")] == state["notes"]
    assert len(state["notes"]) == 2
    # The first rank has the second's GPU until its own CUDA runs.
    assert set(early) == {"seconds"}
    for sample, used in ((narrowed, 1000), (taken, 1001), (last, 1000)):
        assert sample["gpu0 nvml memory used"] == used * MIB and not any(name.startswith("gpu1") for name in sample)


def test_two_jobs_on_a_host_sample_apart(library: Path, tmp_path: Path) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": f"{tmp_path}"}
    _, _, _, other = asked(library, tmp_path, {}, MINE, {"environ": {"MASTER_PORT": "another"}}, MINE, SAMPLE, **rank)
    assert "gpu0 nvml energy" in other


def test_a_mig_instance_has_its_memory_and_says_what_is_of_the_whole_gpu(library: Path, tmp_path: Path) -> None:
    opened, sample, everything = asked(library, tmp_path, {"mig": 1}, MINE, SAMPLE, ALL)
    (device,) = opened["devices"]
    assert device["label"] == "0:0" and device["mig"] == {"gpu_instance": 7, "compute_instance": 0}
    of_the_chip = {"nvml memory used", "nvml temperature", "nvml sm clock", "nvml memory clock", "nvml throttle"}
    assert set(sample) == {f"gpu0 {what}" for what in of_the_chip} | {"seconds"}
    assert opened["dropped"]["gpu0 nvml power"] == "MIG: known only for the whole GPU"
    assert [device["key"] for device in everything["devices"]] == ["gpu0", "gpu0:0", "gpu0:1"]


def device(label: str, name: str = "A", uuid: str = "", instance: tuple[int, int] | None = None, **more: Any) -> Device:
    return Device(label, label, label.partition(":")[0], name, uuid or f"GPU-{label}", instance=instance, **more)


PLAIN = [device("0"), device("1", uuid="GPU-1a"), device("2", uuid="GPU-1b")]
DIVIDED = [
    device("0", divided=True),
    device("0:0", uuid="MIG-a", instance=(7, 0)),
    device("0:1", uuid="MIG-b", instance=(8, 0)),
    device("1"),
]


@pytest.mark.parametrize(
    ("found", "wanted", "labels"),
    [
        (PLAIN, None, ["0", "1", "2"]),
        (PLAIN, "", []),
        (PLAIN, "1", ["1"]),
        (PLAIN, " 2 , 0", ["2", "0"]),
        (PLAIN, "0,-1,1", ["0"]),
        (PLAIN, "0,7,1", ["0"]),
        (PLAIN, "GPU-1a,GPU-0", ["1", "0"]),
        (PLAIN, "GPU-1", []),
        (PLAIN, "NoDevFiles", []),
        (DIVIDED, None, ["0:0"]),
        (DIVIDED, "0", ["0:0"]),
        (DIVIDED, "1", ["1"]),
        (DIVIDED, "MIG-b", ["0:1"]),
        (DIVIDED, "MIG-GPU-0/8/0", ["0:1"]),
        (DIVIDED, "MIG-GPU-0/9/0", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(found: list[Device], wanted: str | None, labels: list[str]) -> None:
    assert [device.label for device in visible_devices(found, wanted).devices] == labels


def test_what_is_uncertain_about_the_devices_is_said() -> None:
    mixed = [device("0", "A"), device("1", "B")]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in visible_devices(mixed, None).notes[0]
    assert visible_devices(mixed, None, order="PCI_BUS_ID").notes == ()
    by_cuda = visible_devices(mixed, "0,1", uuids=["1", "9"])
    assert [device.label for device in by_cuda.devices] == ["1"] and by_cuda.notes[0].startswith("NVML does not show 9,")
    assert visible_devices(DIVIDED, None, uuids=["b"]).devices == (DIVIDED[2],)


# --- the other samplers -----------------------------------------------------------------------------------------------


def test_a_process_samples_its_resident_bytes_and_what_its_container_is_charged() -> None:
    levels = {what: value for what, _, value in ProcessSampler().sample()}
    assert levels["rss"] > MIB
    assert ("cgroup memory" in levels) == (cgroup_folder() is not None)
    assert [type(sampler) for sampler in process_samplers()] == [ProcessSampler, TorchSampler]


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_of_a_container_is_not_counted(tmp_path: Path, version: int) -> None:
    folder, kind, line = (
        ("sys/fs/cgroup/memory", "cgroup cgroup rw,memory", "4:memory:/job/a")
        if version == 1
        else ("sys/fs/cgroup", "cgroup2 cgroup2 rw", "0::/job/a")
    )
    usage, prefix = ("memory.usage_in_bytes", "total_") if version == 1 else ("memory.current", "")
    here = tmp_path / folder / "a"
    here.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:cpu:/\n{line}\n")
    # A container sees its own part of the tree at the mount, and its host's path.
    (tmp_path / "proc/self/mountinfo").write_text(f"31 23 0:28 /job /{folder} rw shared:1 - {kind}\n")
    (here / usage).write_text("1000000\n")
    (here / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file 300000\n{prefix}active_file 200000\n")
    assert ProcessSampler(tmp_path).sample() == [("cgroup memory", "", 500_000)]


def test_torch_is_sampled_once_its_cuda_runs_and_never_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for a CUDA build, which the tests' machine need not have; the shapes are those of torch 2.13.
    running = False
    levels = {"allocated_bytes": {"all": {"current": 5}}, "reserved_bytes": {"all": {"current": 8}}}
    cuda = SimpleNamespace(
        is_initialized=lambda: running,
        device_count=lambda: 2,
        memory_stats_as_nested_dict=lambda index: levels,
        host_memory_stats=lambda: {"allocated_bytes.current": 16},
        get_device_properties=lambda index: SimpleNamespace(uuid=f"00000000-{index}"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert TorchSampler().sample() == () and torch_uuids() is None
    running = True
    assert torch_uuids() == ["00000000-0", "00000000-1"]
    sampled = TorchSampler().sample()
    assert sampled[:2] == [("cuda allocated", "cuda:0", 5), ("cuda reserved", "cuda:0", 8)]
    assert sampled[-1] == ("pinned", "", 16) and len(sampled) == 5
    del cuda.device_count
    assert TorchSampler().sample() == [] and torch_uuids() is None
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert TorchSampler().sample() == ()


def test_the_allocator_of_any_type_of_device_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = {"allocated_bytes.all.current": 5, "reserved_bytes.all.current": 8}
    module = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 1, current_device=lambda: 0, memory_stats=lambda index: levels
    )
    names = SimpleNamespace(_get_privateuse1_backend_name=lambda: "maia")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=names, maia=module))
    assert TorchSampler().sample() == [("cuda allocated", "maia:0", 5), ("cuda reserved", "maia:0", 8)]
    assert surroundings.device() == "maia:0"
    # The device on paper has no memory, and a simulation's times are the machine's.
    names._get_privateuse1_backend_name = lambda: "virtual"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=names, virtual=module))
    assert TorchSampler().sample() == () and surroundings.device() is None


def test_nothing_to_read_is_no_reading(tmp_path: Path) -> None:
    assert ProcessSampler(tmp_path).sample() == []
    assert TorchSampler().sample() == ()
    replay = ReplaySampler([[("rss", "", 1)], [("rss", "", 2)]])
    assert [replay.sample() for _ in range(3)] == [[("rss", "", 1)], [("rss", "", 2)], ()]


@pytest.mark.gpu
def test_on_a_gpu_the_driver_answers_and_agrees_with_torch() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; the fake library holds the same but for the truth")
    torch.zeros(1, device="cuda")
    sampler = open_gpus(required=True)
    try:
        levels = {(what, key): value for what, key, value in sampler.sample()}
        state = sampler.state()
        devices = state["devices"]
        assert isinstance(devices, list) and len(devices) == torch.cuda.device_count()
        free, total = torch.cuda.mem_get_info(0)
        assert abs(levels["nvml memory used", "gpu0"] - (total - free)) < 1 << 30
        assert {"nvml utilisation", "nvml temperature", "nvml power"} <= {what for what, _ in levels}
        assert {what for what, _, _ in TorchSampler().sample()} >= {"cuda allocated", "cuda reserved"}
    finally:
        sampler.close()
