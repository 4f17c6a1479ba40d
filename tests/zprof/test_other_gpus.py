"""AMD's and Intel's GPUs are read by ctypes, against libraries that answer as their headers declare, and as they should not."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_gpus import MIB, Amd, Intel, build, drive, environment
from tests.support.fake_nvml import ALL, CLOSE, MINE, SAMPLE, STATE
from tests.support.paths import ROOT
from zprof.gpu import amd, intel
from zprof.gpu.answers import Refused, Unbelievable
from zprof.gpu.devices import Device, at_places
from zprof.gpu.library import Rate
from zprof.gpu.vendors import AMD, INTEL, quantity_of, rows_of, throttles

pytestmark = pytest.mark.filterwarnings("error")
Kind = type[Amd] | type[Intel]
BOTH = pytest.mark.parametrize("kind", [Amd, Intel], ids=["amd", "intel"])


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    return {kind: build(kind, tmp_path_factory.mktemp(kind.__name__)) for kind in (Amd, Intel)}


def asked(folder: Path, kind: Kind, at: Path, values: Mapping[str, int], *script: Mapping[str, Any], **more: str) -> list[Any]:
    slots = at / "slots"
    kind(slots, values)
    return drive(kind, folder, slots, script, **more)


def uuid(device: int, tile: int = -1) -> str:
    """As torch.xpu says it, of the fake library's device or of one of its tiles."""
    return bytes([0x80] * 7 + [device] + [0x80] * 7 + [tile + 1]).hex()


def bus(number: int) -> dict[str, int]:
    """What torch says of where a HIP device is."""
    return {"pci_domain_id": 1, "pci_bus_id": 0x63 + number, "pci_device_id": 0}


#: What the library answers, the quantities that are not seen then, and why.
UNSEEN: list[tuple[Kind, dict[str, int], tuple[str, ...], str]] = [
    (Amd, {"ret_energy": 2}, ("power", "energy"), "not supported"),
    (Amd, {"ret_activity": 10}, ("utilisation",), "no permission"),
    (Amd, {"activity": 0xFFFF}, ("utilisation",), "answered 65535 %, expected 0 to 100"),
    (Amd, {"core_clock": 2**32 - 1}, ("core clock",), "answered that it is not available"),
    # Thousandths of a degree, as the header says, would be no temperature.
    (Amd, {"hotspot": 61_000, "edge": 45_000}, ("temperature",), "answered 61000 C, expected -50 to 250"),
    (Amd, {"used": 2**60}, ("memory used",), f"answered {2**60} bytes, more than there are"),
    (Amd, {"energy_step": 0}, ("power",), "answered no power at all"),
    (Amd, {"energy": 0, "energy_step": 0}, ("power", "energy"), "answered that it is not available"),
    (Amd, {"resolution_64ths": 0}, ("power", "energy"), "answered that it is not available"),
    (Amd, {"stamp_step": 0}, ("power",), "its counter does not move"),
    (Intel, {"ret_engines": 0x78000003}, ("utilisation",), "not supported"),
    (Intel, {"ret_activity": 0x70010000}, ("utilisation",), "no permission"),
    (Intel, {"ret_powers": 0x78000003}, ("power", "energy"), "not supported"),
    (Intel, {"ret_memories": 0x70020000}, ("memory used",), "a library it needs is missing"),
    (Intel, {"free": 49_000 * MIB}, ("memory used",), "answered more free bytes than there are"),
    (Intel, {"core_clock": -1}, ("core clock",), "answered -1.0 MHz, expected 0 to 100000"),
    (Intel, {"nan": 1}, ("temperature", "core clock", "memory clock"), "answered nan"),
    (Intel, {"bandwidth": 0}, ("pcie",), "not supported"),
    (Intel, {"ret_sensor": 0x12345}, ("temperature",), "error 0x12345"),
]
#: What the library answers, the state it is in then, and what is said of it.
STATES: list[tuple[Kind, dict[str, int], str, str]] = [
    (Amd, {"ret_init": 34}, "no driver", "driver not loaded"),
    (Amd, {"ret_init": 10}, "no permission", "no permission"),
    (Amd, {"ret_init": 777}, "failed", "error 0x309"),
    (Amd, {"ret_sockets": 16}, "failed", "error 0x10"),
    (Amd, {"count": 0}, "no devices", "no devices"),
    (Amd, {"count": 5000}, "failed", "counts 5000, expected at most 256"),
    (Intel, {"ret_init": 0x78000001}, "no driver", "no driver for a GPU here"),
    (Intel, {"ret_init": 0x70010000}, "no permission", "no permission"),
    (Intel, {"ret_drivers": 0x7FFFFFFE}, "failed", "unknown error"),
    (Intel, {"count": 0}, "no devices", "no devices"),
    (Intel, {"npu": 1}, "no devices", "no devices"),
    (Intel, {"ret_memory_state": 0x70000001}, "lost", "GPU is lost"),
]


def case(kind: Kind, values: Mapping[str, int]) -> str:
    return f"{kind.__name__} {sorted(values.items())}"


@pytest.fixture(scope="module")
def answers(libraries: dict[Kind, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """The state and a sample after each of the cases; one process a library asks them all."""
    found: dict[str, tuple[Any, Any]] = {}
    for kind in (Amd, Intel):
        cases = [each[1] for each in (*UNSEEN, *STATES) if each[0] is kind]
        script = [step for values in cases for step in ({"set": {**kind.defaults, **values}}, ALL, SAMPLE)]
        told = asked(libraries[kind], kind, tmp_path_factory.mktemp("cases"), {}, *script)
        found |= {case(kind, values): (told[3 * place + 1], told[3 * place + 2]) for place, values in enumerate(cases)}
    return found


# --- layouts ----------------------------------------------------------------------------------------------------------


LAYOUTS = [
    (kind, structure)
    for kind, module in ((Amd, amd), (Intel, intel))
    for structure in vars(module).values()
    if isinstance(structure, type) and issubclass(structure, ctypes.Structure)
]


@pytest.mark.parametrize(("kind", "structure"), LAYOUTS, ids=[structure.__name__ for _, structure in LAYOUTS])
def test_a_structure_is_laid_out_as_the_compiler_lays_out_the_headers(
    libraries: dict[Kind, Path], kind: Kind, structure: type[ctypes.Structure]
) -> None:
    layout = ctypes.CDLL(str(libraries[kind] / kind.library)).fake_layout
    layout.restype, layout.argtypes = ctypes.c_long, [ctypes.c_char_p]
    documented = str(structure.__doc__).split("``")[1::2]
    for name in documented:
        if (size := layout(name.encode())) < 0:
            continue  # The same under another name.
        assert ctypes.sizeof(structure) == size, name
        for field in structure._fields_:
            assert getattr(structure, field[0]).offset == layout(f"{name}.{field[0]}".encode()), (name, field[0])
        return
    raise AssertionError(f"none of {documented} is in the headers")


# --- what answers -----------------------------------------------------------------------------------------------------


def test_amds_quantities_come_in_the_unit_of_their_names(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    opened, sample, state, _, get = asked(
        libraries[Amd], Amd, tmp_path, {}, MINE, SAMPLE, STATE, CLOSE, {"get": ["inits", "shutdowns"]}
    )
    assert opened["state"] == "ok" and opened["why"] == "" and opened["dropped"] == {} and opened["notes"] == []
    (device,) = opened["devices"]
    # Bits of the partition are no part of the address.
    assert device == {
        "key": "gpu0", "label": "0", "name": "Fake MI300X", "uuid": "0001:63:00.0", "memory_nbytes": 192_000 * MIB,
    }  # fmt: skip
    # Energy grows by 15.25 mJ a reading; power reads the counter too.
    assert sample.pop("gpu0 amd energy") in (15, 30, 31) and sample.pop("seconds") >= 0
    assert sample == {
        "gpu0 amd memory used": 1000 * MIB,
        "gpu0 amd utilisation": 37,
        "gpu0 amd power": 305_000,
        "gpu0 amd temperature": 61,
        "gpu0 amd core clock": 2100,
        "gpu0 amd memory clock": 1300,
    }
    assert state["sources"]["amd power"] == "amdsmi_get_energy_count (energy / time)"
    # Its init is not counted: who shuts it down shuts it down for the script too.
    assert get == {"inits": 1, "shutdowns": 0}


def test_intels_quantities_come_in_the_unit_of_their_names(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    grown = {"set": {"tx": 1500, "rx": 3000, "reasons": 0x9}}
    opened, _, sample, state = asked(libraries[Intel], Intel, tmp_path, {}, ALL, grown, SAMPLE, STATE)
    assert opened["state"] == "ok" and opened["driver"] == "1.6.33578" and opened["dropped"] == {}
    (device,) = opened["devices"]
    assert (device["name"], device["uuid"], device["memory_nbytes"]) == ("Fake Max 1550", uuid(0), 48_000 * MIB)
    # The first reading of the counter is its begin, and power reads it too.
    assert sample.pop("gpu0 intel energy") in (30, 61) and sample.pop("seconds") >= 0
    assert sample == {
        # Of the device's own module, not of the host's.
        "gpu0 intel memory used": 1000 * MIB,
        # Of all engines, not of those for computing.
        "gpu0 intel utilisation": 37,
        # Of the card, not of its memory, which comes first.
        "gpu0 intel power": 305_000,
        "gpu0 intel temperature": 58,
        "gpu0 intel core clock": 1550,
        "gpu0 intel memory clock": 3200,
        "gpu0 intel throttle": 0x9,
        "gpu0 intel pcie tx": 500,
        "gpu0 intel pcie rx": 1000,
    }
    assert throttles(0x9, INTEL) == ["power cap", "heat limit"] and throttles(1 << 20, INTEL) == ["reason 0x100000"]
    assert state["sources"]["intel pcie"] == "zesDevicePciGetStats"


def test_the_power_of_a_driver_that_knows_no_levels_is_that_of_its_first_domain(
    libraries: dict[Kind, Path], tmp_path: Path
) -> None:
    # Here the first is that of the memory, whose counter stands still: no power, rather than a wrong one.
    opened, *_ = asked(libraries[Intel], Intel, tmp_path, {"no_levels": 1}, ALL, CLOSE)
    assert opened["dropped"] == {"gpu0 intel power": "answered no power at all"}
    assert "intel energy" in opened["sources"]


@pytest.mark.parametrize(("kind", "values", "gone", "why"), UNSEEN)
def test_what_a_device_does_not_answer_is_not_seen_and_never_0(
    answers: dict[str, tuple[Any, Any]], kind: Kind, values: dict[str, int], gone: tuple[str, ...], why: str
) -> None:
    opened, sample = answers[case(kind, values)]
    prefix = "amd" if kind is Amd else "intel"
    assert set(opened["dropped"]) == {f"gpu0 {prefix} {quantity}" for quantity in gone}
    assert all(why in said for said in opened["dropped"].values()), opened["dropped"]
    assert not any(name.startswith(f"gpu0 {prefix} {quantity}") for name in sample for quantity in gone)
    assert f"gpu0 {prefix} memory clock" in sample or "memory clock" in gone


def test_temperature_is_of_the_edge_where_there_is_no_hotspot(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    _, sample = asked(libraries[Amd], Amd, tmp_path, {"ret_hotspot": 2}, MINE, SAMPLE)
    assert sample["gpu0 amd temperature"] == 45


@BOTH
def test_a_function_the_library_lacks_is_said_by_its_name(tmp_path: Path, kind: Kind) -> None:
    folder = build(kind, tmp_path / "old", "ENERGY", "UUID")
    # A tile is found by the function that an older Level Zero lacks.
    begun = {"xpu": [uuid(0, 1)]} if kind is Intel else {}
    _, opened, _, state = asked(folder, kind, tmp_path, {"tiles": 2} if kind is Intel else {}, begun, MINE, SAMPLE, STATE)
    if kind is Amd:
        assert opened["dropped"]["gpu0 amd power"] == "amdsmi_get_energy_count is not in this library"
    else:
        assert state["state"] == "no devices"
        assert state["notes"] == [f"Level Zero does not show {uuid(0, 1)}, on which this process computes"]


@BOTH
def test_one_bad_answer_is_left_out_and_the_next_one_counts(libraries: dict[Kind, Path], tmp_path: Path, kind: Kind) -> None:
    bad = {"ret_clock": 30} if kind is Amd else {"ret_clock_state": 0x70000007}
    good = dict.fromkeys(bad, 0)
    script = [ALL, {"set": bad}, SAMPLE, {"set": good}, SAMPLE, STATE]
    _, _, during, _, after, state = asked(libraries[kind], kind, tmp_path, {}, *script)
    names = [name for name in after if name.endswith(" clock")]
    assert len(names) == 2 and not set(names) & set(during) and state["dropped"] == {}


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_rate_is_of_the_counters_own_clock_and_is_not_made_up() -> None:
    readings = iter([(100, 10), (400, 20), (400, 20), (1000, 40), (5, 1), (25, 11)])
    rate = Rate(lambda: next(readings))
    assert rate() == 30.0
    # It was not written anew since.
    assert rate() == 30.0
    assert rate() == 30.0
    with pytest.raises(Unbelievable, match="was reset"):
        rate()
    assert rate() == 2.0
    still = Rate(lambda: (7, 7))
    with pytest.raises(Unbelievable, match="does not move"):
        still()


def test_a_rate_whose_counter_cannot_be_read_says_why_each_time() -> None:
    def refuse() -> tuple[int, int]:
        raise Refused("no permission", final=True)

    rate = Rate(refuse)
    rate.begin()
    for _ in range(2):
        with pytest.raises(Refused, match="no permission"):
            rate()


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "values", "state", "said"), STATES)
def test_a_library_that_does_not_serve_is_a_state_of_one_line(
    answers: dict[str, tuple[Any, Any]], kind: Kind, values: dict[str, int], state: str, said: str
) -> None:
    opened, sample = answers[case(kind, values)]
    assert opened["state"] == state and said in opened["why"] and opened["why"].isprintable()
    assert set(sample) == {"seconds"}


@BOTH
def test_a_library_is_not_loaded_where_the_kernel_has_no_gpu_of_its_vendor(
    libraries: dict[Kind, Path], tmp_path: Path, kind: Kind
) -> None:
    opened, get = asked(libraries[kind], kind, tmp_path, {}, ALL, {"get": ["inits"]}, FAKE_DRM=str(tmp_path))
    assert opened["state"] == "absent" and opened["why"].startswith("no NVML: ") and opened["notes"] == []
    assert get == {"inits": 0}


@BOTH
def test_without_the_library_its_gpu_is_noted_and_nothing_is_sampled(
    libraries: dict[Kind, Path], tmp_path: Path, kind: Kind
) -> None:
    # A file that is no library hides the one a machine with a driver has.
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / kind.library).write_bytes(b"no library")
    elsewhere = {"LD_LIBRARY_PATH": str(tmp_path / "none"), "ROCM_PATH": str(tmp_path / "none")}
    opened, sample = asked(libraries[kind], kind, tmp_path, {}, ALL, SAMPLE, **elsewhere)
    assert opened["state"] == "absent" and set(sample) == {"seconds"}
    (note,) = opened["notes"]
    assert note.startswith(f"a GPU of another vendor is not sampled: no {(AMD if kind is Amd else INTEL).library}: ")


def test_nvml_comes_first_and_leaves_the_others_alone(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    from tests.support import fake_nvml

    nvidia = fake_nvml.build(tmp_path / "nvidia")
    fake_nvml.Slots(tmp_path / "nvml")
    # The variable of the slots of NVML goes first in what the steps steer.
    paths = {"LD_LIBRARY_PATH": f"{nvidia}:{libraries[Amd]}", "FAKE_NVML": str(tmp_path / "nvml")}
    code = (
        "import json, os, pathlib; from zprof.gpu import library; library.DRM = pathlib.Path(os.environ['FAKE_DRM']);"
        "from zprof.gpu.sampling import open_gpus; s = open_gpus(); print(s.note()[0], s.state()['state']); s.close()"
    )
    Amd(tmp_path / "slots", {})
    env = environment(Amd, libraries[Amd], tmp_path / "slots", **paths)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env)
    assert done.stdout == "nvml ok\n" and not done.stderr
    assert Amd(tmp_path / "slots")["inits"] == 0


def test_a_gpu_that_is_lost_is_told_and_its_neighbour_goes_on(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    """One of two cards falls off the bus: here all of its kind answer so, and one that answers once more is asked no more."""
    script = [ALL, SAMPLE, {"set": {"ret_memory_state": 0x70000006}}, SAMPLE, {"set": {"ret_memory_state": 0}}, SAMPLE, STATE]
    answers = asked(libraries[Intel], Intel, tmp_path, {"count": 2}, *script)
    assert {key[:4] for key in answers[1] if key != "seconds"} == {"gpu0", "gpu1"}
    assert set(answers[5]) == {"seconds"} and answers[6]["state"] == "lost"
    assert answers[6]["notes"] == [f"gpu{card} (Fake Max 1550): GPU requires a reset" for card in range(2)]


@BOTH
def test_a_call_that_hangs_keeps_no_other_thread(libraries: dict[Kind, Path], tmp_path: Path, kind: Kind) -> None:
    """The recorder samples once more as it ends, and closes: neither may wait for a driver that does not answer."""
    code = """
import os, pathlib, sys, threading
from tests.support.fake_gpus import KINDS
from zprof.gpu import library
from zprof.gpu.sampling import open_gpus
library.DRM = pathlib.Path(os.environ["FAKE_DRM"])
kind = next(kind for kind in KINDS if kind.variable in os.environ)
slots = kind(pathlib.Path(os.environ[kind.variable]))
sampler = open_gpus(everything=True)
assert sampler.ok and sampler.sample()
slots["block_us"] = 900_000_000
stuck = threading.Thread(target=sampler.sample, daemon=True)
stuck.start()
while not sampler._asking.locked():
    pass
print(sampler.sample(), sampler.state()["state"])
sampler.close()
sampler.close()
print(stuck.is_alive(), sampler.sample(), len(sampler.state()["devices"]))
"""
    kind(tmp_path / "slots")
    env = environment(kind, libraries[kind], tmp_path / "slots")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)
    assert done.stdout.splitlines() == ["() ok", "True () 1"], done.stderr


@BOTH
def test_mutated_answers_give_a_right_reading_or_a_state_of_one_line(
    libraries: dict[Kind, Path], tmp_path: Path, kind: Kind
) -> None:
    kind(tmp_path / "slots")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.support.fake_gpus.fuzz", "600", "7"],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
        env=environment(kind, libraries[kind], tmp_path / "slots"),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["cases"] == 600 and not done.stderr
    # It reached every kind of end, and mostly the samples.
    assert {"ok", "no driver", "no permission", "no devices", "failed"} <= set(told["states"]), told
    assert told["states"]["ok"] > 300 and told["readings"] > 1000


# --- devices ----------------------------------------------------------------------------------------------------------


def labels(state: Mapping[str, Any]) -> list[str]:
    return [device["label"] for device in state["devices"]]


def test_until_hip_runs_devices_are_those_the_variables_leave_to_this_process(
    libraries: dict[Kind, Path], tmp_path: Path
) -> None:
    cases: list[tuple[dict[str, str], list[str]]] = [
        ({}, ["0", "1", "2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "3"}, ["3"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "3"}, ["1"]),
        ({"ROCR_VISIBLE_DEVICES": "3,1,0"}, ["3", "1", "0"]),
        # HIP numbers what ROCm leaves it.
        ({"ROCR_VISIBLE_DEVICES": "3,1,0", "HIP_VISIBLE_DEVICES": "2,0"}, ["0", "3"]),
        ({"HIP_VISIBLE_DEVICES": "1,7,0"}, ["1"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0123456789abcdef"}, []),
    ]
    unset = dict.fromkeys(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
    script = [step for variables, _ in cases for step in ({"environ": {**unset, **variables}}, MINE, SAMPLE, CLOSE)]
    answers = asked(libraries[Amd], Amd, tmp_path, {"count": 4}, *script)
    for place, (variables, expected) in enumerate(cases):
        opened, sample = answers[4 * place + 1 : 4 * place + 3]
        assert labels(opened) == expected, variables
        used = [sample[f"gpu{number} amd memory used"] for number in range(len(expected))]
        assert used == [(1000 + int(label)) * MIB for label in expected], variables
        assert any("HIP may number devices differently" in note for note in opened["notes"]), variables
        assert (opened["state"] == "ok") == bool(expected), variables


def test_devices_are_keyed_anew_by_the_bus_when_hip_begins_to_run(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    """The script says which devices it takes after the recording began, and HIP's order is not that of the bus."""
    script = [MINE, {"environ": {"HIP_VISIBLE_DEVICES": "2,1"}}, {"cuda": [bus(2), bus(0)]}, SAMPLE, STATE]
    _, _, _, sample, state = asked(libraries[Amd], Amd, tmp_path, {"count": 3}, *script)
    assert (sample["gpu0 amd memory used"], sample["gpu1 amd memory used"]) == (1002 * MIB, 1000 * MIB)
    assert "gpu2 amd memory used" not in sample
    assert [(device["key"], device["label"]) for device in state["devices"]] == [("gpu0", "2"), ("gpu1", "0")]
    said = "keys corrected when torch began to compute on them; until then by the bus: gpu0 0, gpu1 1, gpu2 2"
    assert state["notes"] == [said]


def test_a_device_hip_has_and_the_library_has_not_is_noted(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    _, opened = asked(libraries[Amd], Amd, tmp_path, {}, {"cuda": [bus(0), bus(9)]}, MINE)
    assert labels(opened) == ["0"]
    assert opened["notes"] == ["AMD SMI does not show 0001:6c:00, on which this process computes"]


def test_level_zero_begins_when_torch_computes_on_it_and_not_before(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    """What it begins with is for the whole process, and a script's to choose."""
    counts = {"get": ["inits"]}
    script = [MINE, SAMPLE, STATE, counts, {"xpu": [uuid(1), uuid(0)]}, SAMPLE, STATE, SAMPLE, counts]
    answers = asked(libraries[Intel], Intel, tmp_path, {"count": 2}, *script, ZE_AFFINITY_MASK="1")
    _, first, before, none, _, second, after, third, once = answers
    assert set(first) == {"seconds"} and before["state"] == "absent"
    assert before["notes"] == ["Level Zero is asked once torch.xpu runs"] and none == {"inits": 0}
    # As torch numbers them, whatever the mask says: it read that itself.
    assert labels(after) == ["1", "0"] and after["state"] == "ok" and once == {"inits": 1}
    for sample in (second, third):
        assert (sample["gpu0 intel memory used"], sample["gpu1 intel memory used"]) == (1001 * MIB, 1000 * MIB)


def test_a_script_that_takes_sysman_for_itself_keeps_it(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    script = [MINE, {"xpu": [uuid(0)]}, SAMPLE, STATE, {"get": ["inits"]}]
    *_, sample, state, get = asked(libraries[Intel], Intel, tmp_path, {}, *script, ZES_ENABLE_SYSMAN="1")
    assert set(sample) == {"seconds"} and state["state"] == "failed" and "ZES_ENABLE_SYSMAN" in state["why"]
    assert get == {"inits": 0}


def test_a_tile_that_torch_counts_as_a_device_has_its_own_figures(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    script = [{"xpu": [uuid(0, 0), uuid(0, 1), uuid(1, 0)]}, MINE, SAMPLE, SAMPLE, STATE]
    *_, sample, state = asked(libraries[Intel], Intel, tmp_path, {"count": 2, "tiles": 2}, *script)
    assert labels(state) == ["0.0", "0.1", "1.0"] and state["notes"] == []
    used = [sample[f"gpu{place} intel memory used"] for place in range(3)]
    assert used == [1000 * MIB + 1024, 1000 * MIB + 2048, 1001 * MIB + 1024]
    assert sample["gpu1 intel power"] == 305_000 and sample["gpu1 intel utilisation"] == 37
    # What only the card has is not said of a tile: not the clock of its memory, and not what crossed its bus.
    assert state["dropped"]["gpu1 intel memory clock"] == "not supported"
    assert state["dropped"]["gpu1 intel pcie"].endswith("known only for the whole card")


def test_a_card_whose_driver_speaks_of_its_tiles_alone_is_all_of_them(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    opened, sample = asked(libraries[Intel], Intel, tmp_path, {"tiles": 2, "only_tiles": 1}, ALL, SAMPLE)
    assert sample["gpu0 intel memory used"] == 2000 * MIB + 3072
    assert opened["devices"][0]["memory_nbytes"] == 96_000 * MIB
    # The sum of both stacks' power, and the mean of how busy they are.
    assert sample["gpu0 intel power"] == 2 * 305_000 and sample["gpu0 intel utilisation"] == 37


def test_of_the_ranks_of_a_host_one_samples_each_gpu(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": f"{tmp_path}"}
    steps = [MINE, MINE, {"use": 0}, SAMPLE, {"use": 1}, SAMPLE, STATE, {"use": 0}, CLOSE, {"use": 1}, SAMPLE]
    answers = asked(libraries[Amd], Amd, tmp_path, {"count": 2}, *steps, **rank)
    first, second, state, taken = answers[3], answers[5], answers[6], answers[10]
    assert "gpu0 amd energy" in first and "gpu1 amd energy" in first
    assert set(second) == {"seconds"} and state["state"] == "ok"
    assert sum(note.endswith("sampled by another rank of this job") for note in state["notes"]) == 2
    assert "gpu0 amd energy" in taken and "gpu1 amd energy" in taken


def test_places_are_read_up_to_the_first_that_is_none() -> None:
    devices = [Device(str(place), None, None, "", "") for place in range(3)]
    chosen, notes = at_places(devices, " 2 ,0,-1,1", "HIP_VISIBLE_DEVICES", "AMD SMI")
    assert [device.label for device in chosen] == ["2", "0"]
    assert notes == ["HIP_VISIBLE_DEVICES: -1 is not the place of a device AMD SMI shows"]
    assert at_places(devices, "", "HIP_VISIBLE_DEVICES", "AMD SMI") == ([], [])


# --- in a trace and in commands ---------------------------------------------------------------------------------------


def test_a_row_is_known_by_its_quantity_whoever_made_the_gpu() -> None:
    assert rows_of("energy") == ("nvml energy", "amd energy", "intel energy")
    assert [quantity_of(what) for what in ("amd power", "nvml pcie tx", "rss", "cgroup memory")] == ["power", "pcie tx", "", ""]


RECORDED = """
import os, pathlib, sys, types
from zprof.gpu import library
library.DRM = pathlib.Path(os.environ["FAKE_DRM"])
import zprof
with zprof.record("run.zprof", level="events", interval_s=0.01, force=True) as recorder:
    from tests.support.waiting import soon
    assert soon(lambda: recorder._sampling._own[-1]._samples >= 5)
"""


def test_a_recording_has_amds_rows_and_their_units_in_exports(libraries: dict[Kind, Path], tmp_path: Path) -> None:
    Amd(tmp_path / "slots")
    env = environment(Amd, libraries[Amd], tmp_path / "slots", PYTHONPATH=f"{ROOT}:{ROOT / 'tools'}")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RECORDED], capture_output=True, text=True, timeout=600, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    import zprof
    from zprof.analysis.ledger import Ledger
    from zprof.show.exports.exported import unit_of
    from zprof.trace.reader import Trace

    trace = Trace.open(tmp_path / "run.zprof")
    ledger = Ledger.of(trace)
    time_ns, energy = ledger.samples("amd energy")["gpu0"]
    assert len(time_ns) >= 5 and energy[-1] > energy[0]
    assert set(ledger.samples("amd power")["gpu0"][1].tolist()) == {305_000}
    assert [unit_of(what) for what in ("amd power", "amd memory used", "intel throttle", "amd core clock")] == [
        "mW", "bytes", "mask", "MHz",
    ]  # fmt: skip
    assert zprof.open(tmp_path / "run.zprof") is not None


@BOTH
def test_top_and_doctor_say_whose_devices_they_show(libraries: dict[Kind, Path], tmp_path: Path, kind: Kind) -> None:
    kind(tmp_path / "slots", {"count": 2})
    env = environment(kind, libraries[kind], tmp_path / "slots")

    def command(*words: str) -> str:
        code = (
            "import os, pathlib, sys; from zprof.gpu import library; library.DRM = pathlib.Path(os.environ['FAKE_DRM']);"
            f"from zprof.cli import main; main({list(words)})"
        )
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=600, env=env, cwd=tmp_path
        )
        assert not done.stderr, done.stderr
        return done.stdout

    vendor = AMD if kind is Amd else INTEL
    told = json.loads(command("top", "-1", "--json"))
    assert told[vendor.prefix]["state"] == "ok" and "nvml" not in told
    assert [device["power_mw"] for device in told["devices"]] == [305_000] * 2
    assert told["devices"][0]["core_clock_mhz"] in (2100, 1550) and "sm_clock_mhz" not in told["devices"][0]
    text = command("top", "-1")
    assert f"devices ({vendor.library} ok" in text and " 305 W " in text and " MHz " in text
    findings = {finding["name"]: finding for finding in json.loads(command("doctor", "--json"))["findings"]}
    assert findings[vendor.library]["status"] == "ok" and "NVML" not in findings
    assert findings["GPU 1"]["found"].startswith("Fake M")
