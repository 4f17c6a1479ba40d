"""Builds libraries that a CUDA build of torch loads in place of NVIDIA's, from the symbols that its own libraries import.

A symbol without a body in ``runtime.c`` or ``libraries.c`` becomes a function that returns 0, which is success everywhere.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("runtime.c", "libraries.c", "stubs.py")

#: What symbols without a version begin with, and the library that has them; the first that fits.
_OWNERS = (
    (r"nccl", "libnccl.so.2"),
    (r"cuFile", "libcufile.so.0"),
    (r"cusparseLt", "libcusparseLt.so.0"),
    (r"cupti", "libcupti"),
    (r"nvrtc", "libnvrtc"),
    (r"cudnn", "libcudnn"),
    (r"curand", "libcurand"),
    (r"cu[A-Z]", "libcuda.so.1"),
)
#: torch opens this one by name, and takes the functions from it by theirs.
_NVML = "libnvidia-ml.so.1"


class Missing(Exception):
    """What is needed to build them and not here."""


def imported(torch_lib: Path) -> dict[str, tuple[str, set[str]]]:
    """Of every library of NVIDIA's that torch needs: the version its symbols have ("" is none), and their names."""
    files = sorted(torch_lib.glob("lib*.so"))
    needed: set[str] = set()
    symbols: set[tuple[str, str]] = set()
    files_of_versions: dict[str, str] = {}
    for file in files:
        needed.update(re.findall(r"\(NEEDED\).*\[(.+)\]", _ran("readelf", "-dW", str(file))))
        library = ""
        for line in _ran("readelf", "-VW", str(file)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                library = found[1]
            if library and (found := re.search(r"Name: (\S+)\s+Flags", line)):
                files_of_versions.setdefault(found[1], library)
        for line in _ran("nm", "-D", "--undefined-only", str(file)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols.add((name, version.lstrip("@")))
    nvidia = {name for name in needed if re.match(r"lib(cu|nv|nccl)", name)}
    libraries: dict[str, tuple[str, set[str]]] = {name: ("", set()) for name in (*sorted(nvidia), _NVML)}
    named = re.findall(rb"\0(nvml[A-Z]\w+)(?=\0)", (torch_lib / "libc10_cuda.so").read_bytes())
    libraries[_NVML][1].update(name.decode() for name in named)
    for name, version in sorted(symbols):
        owner = files_of_versions[version] if version else _owner(name, nvidia)
        if owner in libraries:
            libraries[owner][1].add(name)
            if version:
                libraries[owner] = (version, libraries[owner][1])
    return libraries


def _owner(name: str, libraries: set[str]) -> str:
    for begin, library in _OWNERS:
        if re.match(begin, name):
            return next((each for each in sorted(libraries) if each.startswith(library + ".") or each == library), "")
    return ""


def build(torch_lib: Path, into: Path) -> Path:
    """The folder with the libraries, built where it is not there yet.

    Raises:
        Missing: a tool, with what it said.
    """
    key = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES))
    key.update("".join(f"{file.name} {file.stat().st_size}" for file in sorted(torch_lib.glob("*.so"))).encode())
    folder = into / f"stubs-{key.hexdigest()[:16]}"
    if not (folder / "built").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for library, (version, names) in imported(torch_lib).items():
            _compile(folder, library, version, names)
        (folder / "built").touch()
    return folder


def _compile(folder: Path, library: str, version: str, names: set[str]) -> None:
    stem = library.partition(".")[0]
    by_hand = HERE / ("runtime.c" if stem == "libcudart" else "libraries.c")
    macro = re.sub(r"\W", "_", stem)
    written = set(re.findall(r"^API .*?(\w+)\(", _ran("cc", "-E", "-P", f"-D{macro}", "-DAPI=API", str(by_hand)), re.M))
    lines = [f"int {name}({_argument(name)}" for name in sorted(names - written)]
    generated = folder / f"{stem}.c"
    generated.write_text("static char handle[256];\n" + "\n".join(lines) + "\n")
    script = folder / f"{stem}.map"
    script.write_text(f"{version or stem} {{ global: *; }};\n")
    options = ["-shared", "-fPIC", "-O1", "-w", f"-D{macro}", f"-Wl,-soname,{library}"]
    if version:
        options.append(f"-Wl,--version-script={script}")
    _ran("cc", *options, str(by_hand), str(generated), "-o", str(folder / library), "-ldl", "-lpthread")


def _argument(name: str) -> str:
    """The rest of the function: what creates something answers with a handle."""
    return "void **out) { *out = handle; return 0; }" if "Create" in name else "void) { return 0; }"


def _ran(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        raise Missing(f"{command[0]} is not installed; install a C compiler and binutils") from None
    if done.returncode != 0:
        raise Missing(f"{command[0]} failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout
