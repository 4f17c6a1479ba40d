"""Owns what a device is, which of them NVML shows, MIG instances among them, and which of those a process computes on.

`nvml` asks for them once at the start. It reads no environment of its own and never looks at process numbers, which
mean nothing inside a container.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zprof.gpu.answers import Failure, Nvml, ask, one_line

__all__ = ["Device", "Visible", "at_places", "found_devices", "visible_devices"]

#: More devices than any host has; a larger count is an answer gone wrong, and each is asked for in turn.
_MOST_DEVICES = 64
_MOST_INSTANCES = 16
_MIG_ENABLED = 1


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or an instance of one that is divided.

    Attributes:
        label: "0", or "0:1" for the second instance of GPU 0 and "0.1" for its second tile, in the order of the bus.
        handle: its library's, for what the device itself answers.
        chip: its library's, of the GPU it is or is a part of.
        uuid: or where it is on the bus, where its library knows no UUID.
        instance: (GPU instance, compute instance) of a MIG instance; numbers that NVML did not say are -1.
        divided: a whole GPU whose memory and engines are given to MIG instances.
    """

    label: str
    handle: Any
    chip: Any
    name: str
    uuid: str
    instance: tuple[int, int] | None = None
    divided: bool = False


@dataclass(frozen=True, slots=True)
class Visible:
    """The devices of a process, in its order, and what is uncertain about that."""

    devices: tuple[Device, ...]
    notes: tuple[str, ...] = ()


def found_devices(nvml: Nvml) -> tuple[list[Device], list[str]] | Failure:
    """Every GPU that answers, each followed by its MIG instances; and a line for each that does not."""
    count = ask(nvml.nvmlDeviceGetCount)
    if isinstance(count, Failure):
        return count
    notes: list[str] = []
    if count > _MOST_DEVICES:
        notes.append(f"NVML counts {count} devices, expected at most {_MOST_DEVICES}; the first {_MOST_DEVICES} are asked")
    devices: list[Device] = []
    failures: list[Failure] = []
    for index in range(min(count, _MOST_DEVICES)):
        handle = ask(lambda index=index: nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[misc]
        if isinstance(handle, Failure):
            failures.append(handle)
            notes.append(f"GPU {index}: {handle.why}")
            continue
        devices.extend(_with_instances(nvml, index, handle, notes))
    if failures and not devices:
        return failures[0]
    # One line for each of sixty-four failures would bury everything else.
    return devices, notes if len(notes) <= 8 else [*notes[:7], f"and {len(notes) - 7} more"]


def _with_instances(nvml: Nvml, index: int, handle: Any, notes: list[str]) -> list[Device]:
    name, uuid = _text(ask(lambda: nvml.nvmlDeviceGetName(handle))), _text(ask(lambda: nvml.nvmlDeviceGetUUID(handle)))
    mode = ask(lambda: nvml.nvmlDeviceGetMigMode(handle))
    divided = not isinstance(mode, Failure) and mode[0] == _MIG_ENABLED
    whole = Device(str(index), handle, handle, name, uuid, divided=divided)
    if not divided:
        return [whole]
    most = ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    if isinstance(most, Failure):
        notes.append(f"GPU {index} is divided (MIG), its instances cannot be listed: {most.why}")
        return [whole]
    parts = []
    for place in range(min(most, _MOST_INSTANCES)):
        part = ask(lambda place=place: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))  # type: ignore[misc]
        if not isinstance(part, Failure):
            parts.append(_instance(nvml, f"{index}:{place}", part, handle, name))
    if not parts:
        notes.append(f"GPU {index} is divided (MIG) and shows no instance to this process")
    return [whole, *parts]


def _instance(nvml: Nvml, label: str, part: Any, chip: Any, chip_name: str) -> Device:
    name = _text(ask(lambda: nvml.nvmlDeviceGetName(part))) or f"{chip_name} MIG"
    uuid = _text(ask(lambda: nvml.nvmlDeviceGetUUID(part)))
    numbers = [ask(lambda: nvml.nvmlDeviceGetGpuInstanceId(part)), ask(lambda: nvml.nvmlDeviceGetComputeInstanceId(part))]
    gpu, compute = (-1 if isinstance(number, Failure) else int(number) for number in numbers)
    return Device(label, part, chip, name, uuid, instance=(gpu, compute))


def _text(answer: object) -> str:
    return one_line(answer, 96) if isinstance(answer, str) else ""


def visible_devices(
    found: Sequence[Device], wanted: str | None, *, order: str | None = None, uuids: Sequence[str] | None = None
) -> Visible:
    """The devices a process computes on, in the order in which CUDA numbers them.

    Args:
        found: of `found_devices`.
        wanted: CUDA_VISIBLE_DEVICES; None where it is not set.
        order: CUDA_DEVICE_ORDER.
        uuids: what CUDA itself says, device by device, where it already runs; then nothing is guessed.
    """
    if uuids is not None:
        # CUDA does not say whether it speaks of a GPU or of an instance: the part after the prefix is the same.
        bare = {device.uuid.partition("-")[2]: device for device in found if device.uuid}
        said = [bare.get(uuid.removeprefix("GPU-").removeprefix("MIG-")) for uuid in uuids]
        missing = [uuid for uuid, device in zip(uuids, said, strict=True) if device is None]
        notes = tuple(f"NVML does not show {one_line(uuid, 48)}, on which this process computes" for uuid in missing)
        return Visible(tuple(device for device in said if device is not None), notes)
    chips = [device for device in found if device.instance is None]
    notes_: list[str] = []
    if order != "PCI_BUS_ID" and len({chip.name for chip in chips}) > 1:
        notes_.append("GPUs differ: CUDA may number them differently than the bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    chosen: list[Device] = []
    if wanted is None:
        chosen = [_computing(found, chip) for chip in chips]
    else:
        for token in (part.strip() for part in wanted.split(",")):
            device = _chosen(found, chips, token)
            # CUDA itself stops at the first that is none.
            if device is None:
                if token:
                    notes_.append(f"CUDA_VISIBLE_DEVICES: {one_line(token, 48)} is not among the devices NVML shows")
                break
            chosen.append(device)
    instances = [device for device in chosen if device.instance is not None]
    if instances:
        # CUDA computes on one instance a process, and on no other device beside it.
        chosen = instances[:1]
        notes_.append("MIG: utilisation, power, energy, PCIe and NVLink are known only for the whole GPU and left out")
    return Visible(tuple(chosen), tuple(notes_))


def at_places(devices: Sequence[Device], wanted: str, variable: str, library: str) -> tuple[list[Device], list[str]]:
    """Those of ``devices`` at the places that ``wanted``, the value of ``variable``, lists, up to the first that is none."""
    chosen: list[Device] = []
    for token in (part.strip() for part in wanted.split(",")):
        if not (token.isascii() and token.isdigit() and len(token) < 6 and int(token) < len(devices)):
            said = f"{variable}: {one_line(token, 48)} is not the place of a device {library} shows"
            return chosen, [said] if token else []
        chosen.append(devices[int(token)])
    return chosen, []


def _computing(found: Sequence[Device], chip: Device) -> Device:
    """The GPU itself, or its first instance where it is divided."""
    if not chip.divided:
        return chip
    parts = (device for device in found if device.instance is not None and device.label.startswith(f"{chip.label}:"))
    return next(parts, chip)


def _chosen(found: Sequence[Device], chips: Sequence[Device], token: str) -> Device | None:
    if token.isascii() and token.isdigit():
        # By place in the list of those that answered; NVML and CUDA both leave out GPUs that are lost.
        place = int(token) if len(token) < 6 else len(chips)
        return _computing(found, chips[place]) if place < len(chips) else None
    if token.startswith("MIG-GPU-"):
        uuid, _, numbers = token.removeprefix("MIG-").partition("/")
        chip = next((chip for chip in chips if chip.uuid == uuid), None)
        parts = [device for device in found if chip is not None and device.chip is chip.handle and device.instance is not None]
        return next((part for part in parts if "{}/{}".format(*(part.instance or ())) == numbers), None)
    device = _by_uuid(found, token)
    return None if device is None else _computing(found, device) if device.instance is None else device


def _by_uuid(found: Sequence[Device], uuid: str) -> Device | None:
    """The one device whose UUID begins so; CUDA allows a beginning that is unique."""
    known = [device for device in found if uuid and device.uuid.startswith(uuid)]
    return known[0] if len(known) == 1 else None
