"""Owns which vendors' GPUs are sampled, and how what is sampled of them is called in a trace, with its unit and its bounds.

The libraries are read by it, and reports, pages and exports find their rows by it. It asks no library and imports none.
"""

from __future__ import annotations

from dataclasses import dataclass

from zprof.gpu.answers import INT64_MAX

__all__ = ["AMD", "BOUNDS", "INTEL", "NVIDIA", "VENDORS", "Bounds", "Vendor", "quantity_of", "rows_of", "throttles"]


@dataclass(frozen=True, slots=True)
class Vendor:
    """A vendor of GPUs and the library that says what they do.

    Attributes:
        prefix: what rows of its devices begin with: "nvml" of "nvml power".
        library: as people call it.
        tool: the vendor's own program that shows its devices.
        reset: how a device is reset with it.
        variables: what hides devices from a process.
        remedy: where the library does not answer.
        pci: its number on the bus.
        throttles: (bit of the mask, why clocks are held back).
    """

    prefix: str
    library: str
    tool: str
    reset: str
    variables: tuple[str, ...]
    remedy: str
    pci: int
    throttles: tuple[tuple[int, str], ...] = ()


NVIDIA = Vendor(
    prefix="nvml",
    library="NVML",
    tool="nvidia-smi",
    reset="nvidia-smi --gpu-reset",
    variables=("CUDA_VISIBLE_DEVICES",),
    remedy="start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility, or reinstall the driver",
    pci=0x10DE,
    throttles=(
        (0x1, "idle"),
        (0x2, "clock setting"),
        (0x4, "power cap"),
        (0x8, "hardware slowdown"),
        (0x10, "sync boost"),
        (0x20, "heat (software)"),
        (0x40, "heat (hardware)"),
        (0x80, "power brake"),
        (0x100, "display clock setting"),
        (0x200, "board limit"),
        (0x400, "reliability"),
    ),
)
AMD = Vendor(
    prefix="amd",
    library="AMD SMI",
    tool="amd-smi",
    reset="amd-smi reset --gpureset",
    # ROCm's own comes first: HIP numbers what it leaves.
    variables=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    remedy="start the container with --device /dev/kfd --device /dev/dri, or install the package amd-smi-lib of this ROCm",
    pci=0x1002,
)
INTEL = Vendor(
    prefix="intel",
    library="Level Zero",
    tool="xpu-smi",
    reset="xpu-smi config --reset",
    variables=("ZE_AFFINITY_MASK",),
    remedy="start the container with --device /dev/dri, or install the packages libze1 and libze-intel-gpu1",
    pci=0x8086,
    throttles=(
        (0x1, "power cap"),
        (0x2, "power cap (burst)"),
        (0x4, "current limit"),
        (0x8, "heat limit"),
        (0x10, "power supply"),
        (0x20, "clock setting"),
        (0x40, "board limit"),
        (0x80, "voltage"),
        (0x100, "heat"),
        (0x200, "power"),
    ),
)
#: In the order in which they are looked for.
VENDORS = (NVIDIA, AMD, INTEL)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The unit of a quantity, as exports show it, and what lies outside of which is an answer gone wrong."""

    unit: str
    least: int
    most: int


#: Quantity -> its bounds: more than any device has. What crossed a bus is in bytes so far, as all else that is not here.
BOUNDS = {
    "memory used": Bounds("bytes", 0, 1 << 50),
    "utilisation": Bounds("%", 0, 100),
    "power": Bounds("mW", 0, 100_000_000),
    "energy": Bounds("mJ", 0, INT64_MAX),
    "temperature": Bounds("C", -50, 250),
    "sm clock": Bounds("MHz", 0, 100_000),
    "core clock": Bounds("MHz", 0, 100_000),
    "memory clock": Bounds("MHz", 0, 100_000),
    "throttle": Bounds("mask", 0, INT64_MAX),
}


def quantity_of(what: str) -> str:
    """The quantity of a row: "power" of "nvml power"; "" where the row is not of a GPU's library."""
    prefix, _, quantity = what.partition(" ")
    return quantity if any(vendor.prefix == prefix for vendor in VENDORS) else ""


def rows_of(quantity: str) -> tuple[str, ...]:
    """What a quantity's rows are called, whoever made the GPU. A recording has those of one vendor."""
    return tuple(f"{vendor.prefix} {quantity}" for vendor in VENDORS)


def throttles(mask: int, vendor: Vendor = NVIDIA) -> list[str]:
    """The reasons in ``mask`` in words, without idling, which holds nothing back."""
    named = [word for bit, word in vendor.throttles if mask & bit and word != "idle"]
    others = mask & ~sum(bit for bit, _ in vendor.throttles)
    return [*named, *([f"reason {others:#x}"] if others else [])]
