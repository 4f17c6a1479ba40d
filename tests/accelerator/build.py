"""Builds the accelerator once, into a cache keyed by torch's version and what the sources say.

`accel.py` calls it. There is no build system: one compiler call a file, two at a time, and a link.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
NAME = "_accel"
FLAGS = ("-O1", "-fPIC", "-std=c++20", "-w", f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H")


class CannotBuild(RuntimeError):
    """There is no accelerator on this machine; the text says what is missing."""


def cache() -> Path:
    """The folder of built accelerators: `$ZHOOKS_ACCELERATOR_CACHE`, or below the user's cache."""
    given = os.environ.get("ZHOOKS_ACCELERATOR_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zhooks-accelerator"


def built() -> Path:
    """The built module; the first process builds it, others wait for it."""
    import torch

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CannotBuild("the accelerator needs a C++ compiler (g++), found none: install g++, or set CXX")
    headers = sysconfig.get_paths()["include"]
    if not (Path(headers) / "Python.h").is_file():
        raise CannotBuild(f"the accelerator needs Python's headers, {headers} has no Python.h: install python3-dev")
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {compiler} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    folder = cache() / key.hexdigest()[:16]
    module = folder / f"{NAME}.so"
    if module.is_file():
        return module
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.is_file():
            _compile(compiler, folder, headers).rename(module)
    return module


def _compile(compiler: str, folder: Path, headers: str) -> Path:
    import torch
    from torch.utils import cpp_extension

    includes = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), headers)]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"

    def compiled(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        _call([compiler, *FLAGS, abi, *includes, "-c", str(source), "-o", str(out)])
        return out

    with ThreadPoolExecutor(2) as pool:
        # The longest first.
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: "torch/" not in source.read_text())
        objects = list(pool.map(compiled, sources))
    libraries = Path(torch.__file__).parent / "lib"
    linked = folder / f"{NAME}.so.part"
    names = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    _call([compiler, "-shared", *map(str, objects), f"-L{libraries}", f"-Wl,-rpath,{libraries}", *names, "-o", str(linked)])
    for compiled_file in objects:
        compiled_file.unlink()
    return linked


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[-5:]
        raise CannotBuild(f"the accelerator does not build with torch {_torch()}: " + "\n".join(errors[:20]))


def _torch() -> str:
    import torch

    return str(torch.__version__)
