"""The hardware profile: what a cluster's devices, links, hosts, disks and network can do, as one checked value.

Nothing is guessed: a profile that cannot be is refused.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from offload.documents import Document, Name, Place, Table, explain, nearest, plain, read, sized, words
from offload.errors import HardwareError
from offload.hardware.tables import (
    DTYPES,
    PROFILE,
    Device,
    Disk,
    Host,
    HostLink,
    Link,
    Matmul,
    MemoryBound,
    Network,
    Peak,
    Power,
    Price,
    Text,
    as_flops,
    as_rate,
    as_seconds,
    format_flops,
    format_rate,
    format_seconds,
)
from offload.text import format_size, shown, toml_value

__all__ = ["Hardware", "names"]

_PROFILES = Path(__file__).parent / "profiles"
_WRITERS = {as_rate: format_rate, as_flops: format_flops, as_seconds: format_seconds}


class Hardware(Table):
    """What one kind of node can do, and the network between such nodes.  Its tables are the keys of a profile.

    Raises:
        HardwareError: has one line per problem.
    """

    name: Name = words("unnamed", expected="a name", does="What reports call it.")
    title: Text = words("", expected="text", does="What it is, in a line.")
    kind: Literal["gpu", "cpu"] = words(
        "gpu", expected='"gpu" or "cpu"', does="cpu: a device is a thread of the host, and its memory the host's."
    )
    device: Device = Field(..., description="One accelerator.")
    peak: Peak = Field(..., description="Peak rates of matrix products by dtype, dense.")
    matmul: Matmul = Field(..., description="What fraction of the peak matrix products reach.")
    memory_bound: MemoryBound = Field(..., description="What fraction of the memory's bandwidth other operations reach.")
    link: Link = Field(..., description="Between the devices of a node.")
    host_link: HostLink = Field(..., description="Between a device and its host.")
    host: Host = Field(..., description="The node's memory and processors.")
    disk: Disk | None = Field(None, description="The node's drives; unset: it has none.")
    network: Network | None = Field(None, description="Between nodes; unset: there is one node.")
    power: Power | None = Field(None, description="Watts; unset: no energy is reported.")
    price: Price | None = Field(None, description="Dollars; unset: no price is reported.")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**plain(values))
        except ValidationError as error:
            raise explain(error, Document(PROFILE, "hardware", values), Hardware) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a profile (TOML or JSON, at most 1 MiB).

        Raises:
            HardwareError: missing, unreadable, malformed or impossible; one line per problem, with file and line number.
        """
        try:
            file = Path(path)
        except TypeError:
            found = type(path).__name__[:50]
            known = f"{', '.join(names())}, the path of a profile, or a table of values"
            raise HardwareError(f"hardware must be one of {known}, found {found}") from None
        document = read(file, PROFILE)
        return cls._build(document, {"name": file.stem} | document.values)

    @classmethod
    def of(cls, value: str | os.PathLike[str] | Mapping[str, Any] | Hardware) -> Hardware:
        """Return the profile that ``value`` means.

        Args:
            value: the name of a shipped profile, a path, a table of values, or a ``Hardware``.
        Raises:
            HardwareError: as in ``load``, or ``value`` is none of these.
        """
        if isinstance(value, Hardware):
            return value
        if isinstance(value, Mapping):
            strangers = [key for key in value if not isinstance(key, str)]
            if strangers:
                raise HardwareError(f"hardware needs names for keys, found {type(strangers[0]).__name__[:50]}")
            checked = plain(value)
            return cls._build(Document(PROFILE, "hardware", checked), checked)
        if isinstance(value, str) and value in names():
            return _shipped(value)
        if isinstance(value, str) and os.sep not in value and Path(value).suffix.lower() not in (".toml", ".json"):
            raise HardwareError(_unknown(value))
        return cls.load(value)

    @classmethod
    def _build(cls, document: Document, values: Mapping[str, Any]) -> Self:
        profile = cls.__new__(cls)
        try:
            # Past this class's own __init__, whose error would name neither file nor line.
            BaseModel.__init__(profile, **values)
        except ValidationError as error:
            raise explain(error, document, cls) from None
        return profile

    @model_validator(mode="after")
    def _possible(self) -> Self:
        problems = [*self._links(), *self._stores(), *self._figures()]
        if problems:
            raise PydanticCustomError("hardware", "cannot be", {"problems": problems})
        return self

    def _links(self) -> Iterator[tuple[Place, str]]:
        """No link is faster than what it goes through, and no node's total is more than its devices' sum."""
        device, host, count = self.device, self.host, self.device.count
        bus = {"switch": None, "pcie": ("[host_link] bandwidth", self.host_link.bandwidth)}
        through = bus.get(self.link.through, ("[host] memory_bandwidth", host.memory_bandwidth))
        ends = ("[device] memory_bandwidth", device.memory_bandwidth)
        yield from _above(("link", "bandwidth"), self.link.bandwidth, ends, through)
        memory = ("[host] memory_bandwidth", host.memory_bandwidth)
        yield from _above(("host_link", "bandwidth"), self.host_link.bandwidth, ends, memory)
        yield from _above(("host_link", "node_bandwidth"), self.host_link.node_bandwidth, memory)
        for name in ("link", "host_link"):
            table: Link | HostLink = getattr(self, name)
            total = table.node_bandwidth
            summed = (f"{count} x [{name}] bandwidth", count * table.bandwidth)
            yield from _above((name, "node_bandwidth"), total, summed)
            if total is not None and total < table.bandwidth:
                found = f"found {format_rate(total)}, less than one device's {format_rate(table.bandwidth)}"
                yield (name, "node_bandwidth"), f"{found}: it is what all devices of a node reach at once"
        if self.network is not None:
            links = (f"{count} x [host_link] bandwidth", count * self.host_link.bandwidth)
            yield from _above(("network", "bandwidth"), self.network.bandwidth, links)

    def _stores(self) -> Iterator[tuple[Place, str]]:
        memory = ("[host] memory_bandwidth", self.host.memory_bandwidth)
        half = ("half of [host] memory_bandwidth", self.host.memory_bandwidth / 2)
        yield from _above(("host", "copy_rate"), self.host.copy_rate, half)
        yield from _above(("host", "fresh_rate"), self.host.fresh_rate, memory)
        if self.disk is not None:
            for name in ("read", "write"):
                yield from _above(("disk", name), self.disk.count * getattr(self.disk, name), memory)

    def _figures(self) -> Iterator[tuple[Place, str]]:
        if not any(getattr(self.peak, dtype) for dtype in DTYPES):
            yield ("peak",), f"expected a rate for at least one of {', '.join(DTYPES)}, found none"
        for dtype in DTYPES:
            if getattr(self.matmul, dtype) is not None and getattr(self.peak, dtype) is None:
                yield ("matmul", dtype), f"found a curve, and [peak] has no {dtype}; write the peak, or leave the curve out"
        if self.power is not None and self.power.idle > self.power.max:
            yield ("power", "idle"), f"found {self.power.idle:g} W, more than [power] max, {self.power.max:g} W"

    def replaced(self, **tables: Mapping[str, Any] | None) -> Hardware:
        """Return this profile with other values for some keys, e.g. ``network={"bandwidth": "200 Gb/s"}`` for a slow link.

        Args:
            **tables: by the name of a table, the keys to change; None leaves the table out.
        Raises:
            HardwareError: the result would be impossible, or a key is unknown.
        """
        values = self.values()
        for name, keys in tables.items():
            held = values.get(name, {})
            values[name] = {**held, **keys} if isinstance(held, Mapping) and isinstance(keys, Mapping) else keys
        return Hardware.of(values)

    def values(self) -> dict[str, Any]:
        """Return every key that is set as plain values; ``of`` makes an equal profile of them."""
        values: dict[str, Any] = {"name": self.name, "title": self.title, "kind": self.kind}
        for name, table in self:
            if isinstance(table, Table):
                values[name] = {key: _listed(value) for key, value in table if value is not None}
        return values

    def text(self) -> str:
        """Return a TOML file that loads as an equal profile."""
        lines = [f"{key} = {toml_value(getattr(self, key))}" for key in ("name", "title", "kind")]
        for name, table in self:
            if isinstance(table, Table):
                lines += ["", f"[{name}]"]
                for key, value in table:
                    if value is not None and value not in ("", {}):
                        lines.append(f"{key} = {_written(type(table).model_fields[key], value)}")
        return "\n".join(lines) + "\n"


#: What CUDA calls a device -> the profile that is of just that one; boards of other speeds or memories are not in it.
_DEVICES = {
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA B200": "b200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "Tesla V100-SXM2-32GB": "v100-32",
}


def for_device(name: str) -> Hardware | None:
    """The shipped profile of the device that CUDA calls ``name``; None where there is none of just that one."""
    known = _DEVICES.get(name)
    return None if known is None else _shipped(known)


def names() -> list[str]:
    """List the names of the shipped profiles."""
    return sorted(file.stem for file in _PROFILES.glob("*.toml"))


@cache
def _shipped(name: str) -> Hardware:
    return Hardware.load(_PROFILES / f"{name}.toml")


def _unknown(name: str) -> str:
    near = nearest(name.lower(), names(), 0.5)
    hint = f"did you mean {near}?" if near else "name one, or the path of a .toml file"
    return f"hardware must be one of {', '.join(names())}, found {shown(name)}; {hint}"


def _above(place: Place, rate: float | None, *bounds: tuple[str, float] | None) -> Iterator[tuple[Place, str]]:
    for bound in bounds:
        if rate is not None and bound is not None and rate > bound[1]:
            yield place, f"found {format_rate(rate)}, more than {bound[0]}, {format_rate(bound[1])}, which it goes through"
            return


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _listed(each) for name, each in value.items()}
    return [list(point) for point in value] if isinstance(value, tuple) else value


def _written(field: FieldInfo, value: Any) -> str:
    """``value`` of a key as a file would have it."""
    if isinstance(value, int) and not isinstance(value, bool) and sized(field):
        return toml_value(format_size(value))
    inner = [each for kind in typing.get_args(field.annotation) for each in getattr(kind, "__metadata__", ())]
    for each in (*field.metadata, *inner):
        if isinstance(each, BeforeValidator) and each.func in _WRITERS:
            return toml_value(_WRITERS[each.func](value))
    return toml_value(_listed(value))
