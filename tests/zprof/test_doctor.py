"""``zprof doctor`` says of each thing whether it will work, what was found, and what to do; it needs neither GPU nor torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.specifiers import SpecifierSet

from offload.budget import Machine
from tests.support.fake_nvml import Slots, build, environment
from zprof.cli import main
from zprof.doctor.checks import _meets, host_findings, installed_packages, software_findings
from zprof.doctor.gpu import _driver, torch_build


def findings(*arguments: str) -> dict[str, dict[str, str]]:
    done = CliRunner().invoke(main, ["doctor", "--json", *arguments])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["ok"] is True
    return {finding["name"]: finding for finding in told["findings"]}


def test_doctor_finds_this_machine_fit_and_every_line_has_a_status_and_a_finding() -> None:
    found = findings()
    assert found["python"]["found"] == sys.version.split()[0]
    assert found["torch"]["found"] == metadata.version("torch")
    assert {"NVML", "torch build", "/dev/shm", "processors", "transparent huge pages"} <= set(found)
    for finding in found.values():
        assert finding["status"] in ("ok", "warn") and finding["found"].isprintable()
        assert bool(finding["remedy"]) == (finding["status"] == "warn"), finding


def test_the_text_is_plain_and_gives_the_remedy_below_its_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--path", "/dev/shm"])
    assert done.exit_code == 0 and "\x1b" not in done.output
    lines = done.output.splitlines()
    assert re.fullmatch(r"\d+ ok, \d+ to look at, 0 to fix before zhooks works", lines[-1])
    (at,) = (number for number, line in enumerate(lines) if "  disk tier in /dev/shm" in line)
    assert lines[at].startswith("warn") and "tmpfs" in lines[at] and lines[at + 1].strip().startswith("-> point [disk] path")


def test_a_folder_that_cannot_be_written_is_told_and_left_alone(tmp_path: Path) -> None:
    found = findings("--path", str(tmp_path / "to" / "be" / "made"))
    # Long paths are shortened.
    (entry,) = (entry for name, entry in found.items() if name.startswith("direct I/O in"))
    assert entry["status"] == "ok" or "tmpfs" in str(found)
    assert list(tmp_path.iterdir()) == []
    found = findings("--path", "/proc")
    assert found["direct I/O in /proc"]["status"] == "warn"


def test_a_missing_package_fails_with_4_and_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another zhooks, first on the path, that asks for more.
    (tmp_path / "zhooks-9.dist-info").mkdir()
    more = ["no_such_thing>=2", "torch (>=99)", 'other>=1; extra == "bench"', 'of_old_pythons; python_version < "3"']
    text = "".join(f"Requires-Dist: {line}\n" for line in more) + "\nRequires-Dist: of-the-readme\n"
    (tmp_path / "zhooks-9.dist-info/METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 4
    assert "fail  no_such_thing" in done.output and "-> pip install 'no_such_thing>=2'" in done.output
    assert re.search(r"fail  torch +2\.\S+, expected >=99", done.output)
    assert "other" not in done.output and "of_old" not in done.output
    assert done.output.endswith("2 to fix before zhooks works\n")


@pytest.mark.parametrize(
    ("version", "bounds", "met"),
    [
        ("2.13.0+cpu", ">=2.8,<3", True),
        ("2.7.9", ">=2.8,<3", False),
        ("3.0", "<3", False),
        ("2.8", ">=2.8.0", True),
        ("8.5.1", "<9,>=8.1", True),
        ("1.0", "==1", True),
        ("1.0rc1", "!=1.1", True),
        ("odd", ">=1", True),
        ("1.0", "~=1.0", True),
    ],
)
def test_versions_are_held_against_the_bounds_of_the_project(version: str, bounds: str, met: bool) -> None:
    assert _meets(version, SpecifierSet(bounds)) is met


def test_the_packages_found_are_those_python_knows() -> None:
    found = installed_packages()
    for name in ("torch", "numba", "click", "nvidia-ml-py", "zhooks"):
        assert found[name].version == metadata.version(name)
    assert sorted(found["zhooks"].requires()) == sorted(metadata.requires("zhooks") or [])


def test_a_host_of_bounds_is_read_from_what_its_kernel_writes(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable:  500000 kB\n",
        "proc/self/limits": "Max locked memory         65536                65536                bytes\n",
        "proc/self/status": "CapEff:\t0000000000000000\nVmLck:\t       16 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    found = {finding.name: finding for finding in host_findings(tmp_path, Machine(tmp_path), gpu=True)}
    assert found["available memory (MemAvailable)"].status == "warn"
    locked = found["locked memory (RLIMIT_MEMLOCK)"]
    assert locked.status == "warn" and locked.found.startswith("48 KiB may still be locked")
    assert "--ulimit memlock=-1" in locked.remedy
    assert found["transparent huge pages"].status == "warn"
    assert "2 NUMA nodes" in found["processors"].found
    said = "cannot be used: No such file or directory; NCCL and data loader workers exchange through it"
    assert (found["/dev/shm"].status, found["/dev/shm"].found) == ("warn", said)
    without = {finding.name: finding for finding in host_findings(tmp_path, Machine(tmp_path), gpu=False)}
    assert without["locked memory (RLIMIT_MEMLOCK)"].status == "ok"


def test_torch_is_known_by_its_files() -> None:
    build = torch_build()
    # The files also say which build it is: 2.13.0+cu130 of 2.13.0.
    assert build is not None and build[0].partition("+")[0] == metadata.version("torch").partition("+")[0]
    assert {finding.status for finding in software_findings()} <= {"ok", "warn"}


def test_a_driver_older_than_torch_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, object] = {"driver": "535.1"}
    for version, cuda, status in ((12020, "13.0", "fail"), (12020, "12.8", "warn"), (13000, "12.8", "ok"), (5, "12.8", "ok")):
        monkeypatch.setattr("zprof.doctor.gpu._driver_cuda", lambda version=version: version)
        (finding,) = _driver(state, cuda)
        assert finding.status == status, finding


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.mark.parametrize("values", [{}, {"text": 1}, {"lost": 1}, {"ret_init": 9}])
def test_a_gpu_is_told_with_its_driver_and_a_broken_one_with_its_mend(
    library: Path, tmp_path: Path, values: dict[str, int]
) -> None:
    Slots(tmp_path / "slots", values)
    done = subprocess.run(
        [sys.executable, "-m", "zprof", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(library, tmp_path / "slots"),
    )
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    # A torch built for a later CUDA than the library's driver knows cannot work, and is told so.
    failed = {name for name, finding in found.items() if finding["status"] == "fail"}
    assert failed <= {"driver"} and done.returncode == (4 if failed else 0) and not done.stderr, done.stderr
    if "ret_init" in values:
        assert found["NVML"]["status"] == "warn" and found["NVML"]["found"].startswith("no driver (")
        assert "--gpus all" in found["NVML"]["remedy"] and "GPU 0" not in found
    elif "lost" in values:
        assert found["NVML"]["status"] == "warn" and "GPU is lost" in found["NVML"]["found"]
    else:
        named = "Fake H200" if not values else "a device"
        assert found["NVML"]["status"] == "ok" and found["GPU 0"]["found"] == f"{named}, 138 GiB"
        assert "CUDA up to 12.8" in found["driver"]["found"]


def test_doctor_loads_no_torch() -> None:
    code = (
        "import sys; from zprof.cli import main; main(['doctor'], standalone_mode=False);"
        "print(sorted({'torch', 'numpy', 'numba', 'pynvml', 'pydantic', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env={**os.environ})
    absent = "[]" if "absent" in done.stdout else "['pynvml']"
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == absent, done.stderr
