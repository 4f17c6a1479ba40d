"""Owns what ``zprof doctor`` finds of GPUs: torch's build, the driver, the GPUs' library, and whether they fit each other.

`zprof.commands.doctor` prints it. It reads torch's build from its files and never imports torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from offload.text import as_size
from zprof.doctor.checks import FAIL, OK, WARN, Finding
from zprof.gpu.answers import Failure, ask, one_line
from zprof.gpu.sampling import GpuSampler, open_gpus
from zprof.gpu.vendors import Vendor

__all__ = ["gpu_findings", "has_gpu", "torch_build"]


#: What torch is built for: name in its file -> as people call it.
_RUNTIMES = (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU"))


def torch_build() -> tuple[str, tuple[str, str] | None] | None:
    """(version, ("CUDA", "12.8") or None) of the installed torch, as its own file says; None where there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "unknown", None
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    found = ((known, re.search(rf"^{name}(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)) for name, known in _RUNTIMES)
    built = next(((known, match[1]) for known, match in found if match is not None), None)
    return (version[1] if version else "unknown"), built


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether the kernel has an NVIDIA device, whatever NVML says."""
    return any((root / "dev").glob("nvidia[0-9]*")) or (root / "proc/driver/nvidia/version").exists()


def gpu_findings() -> Iterator[Finding]:
    """Torch's build, the driver, the GPUs' library and its devices; a host without a GPU is well."""
    build = torch_build()
    built = None if build is None else build[1]
    sampler = open_gpus(everything=True)
    try:
        state = sampler.state()
        there = has_gpu() or sampler.ok
        if build is not None:
            yield _build(build[0], built, there)
        yield _library(sampler, state, there)
        if sampler.ok:
            yield from _driver(state, built[1] if built is not None and built[0] == "CUDA" else None)
        yield from _devices(state, sampler.vendor)
    finally:
        sampler.close()


def _build(version: str, built: tuple[str, str] | None, there: bool) -> Finding:
    name = "torch build"
    if built is not None:
        return Finding(name, OK, f"{version}, for {' '.join(built)}")
    if there:
        remedy = "install the build of torch for this GPU: https://pytorch.org/get-started/locally"
        return Finding(name, WARN, f"{version}, for CPU only, on a host with a GPU", remedy)
    return Finding(name, OK, f"{version}, for CPU only")


def _library(sampler: GpuSampler, state: dict[str, object], there: bool) -> Finding:
    name = sampler.vendor.library
    if sampler.ok:
        dropped = state["dropped"]
        assert isinstance(dropped, dict)
        missing = "; ".join(f"{what}: {why}" for what, why in list(dropped.items())[:4])
        return Finding(name, OK, f"answers{f', without {one_line(missing, 300)}' if missing else ''}")
    if there or state["state"] not in ("absent", "no devices"):
        return Finding(name, WARN, f"{state['state']} ({sampler.why})", sampler.vendor.remedy)
    return Finding(name, OK, f"{state['state']}: no GPU here; training runs on the CPU")


def _driver(state: dict[str, object], cuda: str | None) -> Iterator[Finding]:
    version = ask(_driver_cuda)
    known = isinstance(version, int) and 1000 <= version < 1_000_000
    serves = f"{version // 1000}.{version % 1000 // 10}" if known and not isinstance(version, Failure) else "unknown"
    found = str(state["driver"] or "unknown") + (f", for CUDA up to {serves}" if known or cuda is not None else "")
    match = re.match(r"(\d+)\.(\d+)", cuda or "")
    if match is None or isinstance(version, Failure) or not known:
        yield Finding("driver", OK, found)
        return
    wanted = (int(match[1]), int(match[2]))
    has = (version // 1000, version % 1000 // 10)
    if has[0] < wanted[0]:
        remedy = f"install a driver for CUDA {wanted[0]}, or torch for {serves}"
        yield Finding("driver", FAIL, f"{found}; torch is built for CUDA {cuda}", remedy)
    elif has < wanted:
        # Within one major version newer builds run, but the driver cannot compile their kernels' PTX.
        yield Finding("driver", WARN, f"{found}; torch is built for CUDA {cuda}", "update the driver")
    else:
        yield Finding("driver", OK, found)


def _driver_cuda() -> int:
    import pynvml

    return int(pynvml.nvmlSystemGetCudaDriverVersion_v2())


def _devices(state: dict[str, object], vendor: Vendor) -> Iterator[Finding]:
    devices, notes = state["devices"], state["notes"]
    assert isinstance(devices, list) and isinstance(notes, list)
    for device in devices:
        memory = device.get("memory_nbytes")
        found = f"{device['name'] or 'a device'}{f', {as_size(memory)}' if memory else ''}"
        lost = device.get("lost")
        remedy = f"reset it ({vendor.reset}) or restart the host" if lost else ""
        yield Finding(f"GPU {device['label']}", WARN if lost else OK, f"{found}: {lost}" if lost else found, remedy)
    for note in notes:
        yield Finding("GPUs", WARN, one_line(str(note), 300), f"see {vendor.tool}")
    for name in vendor.variables:
        visible = os.environ.get(name)
        if visible is not None:
            yield Finding(name, OK, one_line(visible)) if visible else Finding(name, WARN, "empty: hides every GPU", "unset it")
