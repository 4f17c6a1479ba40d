"""What `pip install` gives people: all modules and data of the checkout, nothing else, and commands that run from there."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
#: Where each top-level package of the wheel lies in the checkout.
PACKAGES = {"zhooks": "zhooks", "offload": "offload", "zprof": "tools/zprof"}


def run(*args: str | Path, cwd: Path, **env: str) -> str:
    """What it printed; the checkout is on no path."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(args, cwd=cwd, env=plain | env, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(what: str, source: Path, to: Path) -> Path:
    """A sdist or a wheel of ``source``, by the build backend, as a frontend calls it without isolation."""
    to.mkdir()
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{what}({str(to)!r})", cwd=source)
    [built] = to.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    for name in ("zhooks", "offload", "tools", "tests", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return build("sdist", source, folder / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Built from the sdist, so that what that lacks is missing here."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent.parent / "unpacked", filter="data")
    [source] = (sdist.parent.parent / "unpacked").iterdir()
    return build("wheel", source, sdist.parent.parent / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    to = wheel.parent.parent / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    run(*pip, "--target", to, wheel, cwd=wheel.parent)
    return to


def of_checkout() -> set[str]:
    """Every file that belongs to a package, by its path in the wheel."""
    return {
        str(PurePosixPath(name, file.relative_to(ROOT / folder).as_posix()))
        for name, folder in PACKAGES.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == of_checkout()
    assert {name.partition("/")[0] for name in names} == set(PACKAGES)


def test_the_wheel_is_for_every_platform_so_that_no_compiler_is_needed(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_metadata_say_what_an_index_shows(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        said = archive.read(name).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    head = said.partition("\n\n")[0].splitlines()
    for line in ("Name: zhooks", "License-Expression: Apache-2.0", "Requires-Python: >=3.11"):
        assert line in head
    assert "Description-Content-Type: text/markdown" in head and any(line.startswith("Keywords: ") for line in head)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = [Requirement(line) for line in config["options"]["install_requires"].split()]
    found = [Requirement(line.partition(":")[2]) for line in head if line.startswith("Requires-Dist:")]
    assert sorted(map(str, needed)) == sorted(str(each) for each in found if each.marker is None)


def test_the_sdist_has_what_a_build_and_a_reader_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO", "CHANGELOG.md"} <= names
    assert {f"{PACKAGES[name.partition('/')[0]]}/{name.partition('/')[2]}" for name in of_checkout()} <= names


def test_an_installed_zhooks_trains_and_its_commands_run(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, zhooks, offload, zprof\n"
        "print(*(module.__file__ for module in (zhooks, offload, zprof)), sep='\\n')\n"
        "model = torch.nn.Linear(4, 4)\n"
        "zhooks.attach(model, policy={'stage': 3})\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "optimizer.step()\n"
    )
    found = run(sys.executable, script, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert found == [str(installed / name / "__init__.py") for name in PACKAGES]
    zprof = installed / "bin" / "zprof"
    assert "0.1" in run(zprof, "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    # Reads data of the package.
    assert "h100" in run(zprof, "hardware", "list", cwd=tmp_path, PYTHONPATH=str(installed))
