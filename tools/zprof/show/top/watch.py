"""Owns one look at the machine for ``zprof top``: devices with their rates, host memory, and the runs that record.

`zprof.commands.top` looks again and again and `view` draws it. It imports neither torch nor, while no run is shown, numpy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.budget import Machine
from zprof.clock import now_ns, wall_ns
from zprof.gpu.sampling import open_gpus
from zprof.gpu.vendors import Vendor, quantity_of, throttles
from zprof.rows import TraceError

if TYPE_CHECKING:
    from zprof.analysis.following import RunFollower, Seen

__all__ = ["Look", "Watch"]

#: Traces that changed this recently are looked into for runs that record.
_RECENT_NS = 60_000_000_000
_MOST_FOUND = 64
#: Running totals, shown as rates: quantity -> name here.
_RATES = {
    "pcie tx": "pcie_tx_bytes_per_s",
    "pcie rx": "pcie_rx_bytes_per_s",
    "nvlink tx": "nvlink_tx_bytes_per_s",
    "nvlink rx": "nvlink_rx_bytes_per_s",
}
_LEVELS = {
    "memory used": "memory_used_nbytes",
    "utilisation": "utilisation_percent",
    "power": "power_mw",
    "temperature": "temperature_c",
    "sm clock": "sm_clock_mhz",
    "core clock": "core_clock_mhz",
    "memory clock": "memory_clock_mhz",
}


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one time.

    Attributes:
        wall_ns: when.
        vendor: of the devices, or NVIDIA where there are none.
        gpus: the sampler's state.
        devices: a map each: key, name, uuid, memory_nbytes, levels and rates that answered, throttles in words.
        host: "total_nbytes", and "bounds", a map each: name and free bytes.
        runs: in the order of their paths.
        problems: a line each for files that cannot be followed.
    """

    wall_ns: int
    vendor: Vendor
    gpus: dict[str, object]
    devices: list[dict[str, Any]]
    host: dict[str, Any]
    runs: list[Seen]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        state = {name: value for name, value in self.gpus.items() if name != "devices"}
        body = {"wall_ns": self.wall_ns, self.vendor.prefix: state, "devices": self.devices, "host": self.host}
        return {**body, "runs": [asdict(run) for run in self.runs], "problems": self.problems}


class Watch:
    """Looks at the machine; `look` as often as wanted, `close` at the end.

    Args:
        paths: traces to follow; empty looks for those written to in ``folder``, the current one unless said.
    Raises:
        TraceError: one of ``paths`` is no trace.
    """

    def __init__(self, paths: Sequence[Path], folder: Path | None = None) -> None:
        self._machine, self._folder = Machine(), folder or Path()
        self._find = not paths
        self._runs: dict[Path, RunFollower] = {}
        self._problems: dict[Path, str] = {}
        for path in paths:
            self._follow(path)
        self._gpus = open_gpus(everything=True)
        self._before: dict[tuple[str, str], int] = {}
        self._before_ns = 0

    @property
    def has_rates(self) -> bool:
        """Whether a second look shows what the first cannot."""
        return self._gpus.ok

    def look(self) -> Look:
        """Look once; rates are those since the look before, and missing in the first."""
        devices = self._devices()
        if self._find:
            self._find_runs()
        runs = [seen for path in sorted(self._runs) if (seen := self._seen(path)) is not None]
        state, problems = self._gpus.state(), list(self._problems.values())
        return Look(wall_ns(), self._gpus.vendor, state, devices, self._host(), runs, problems)

    def close(self) -> None:
        """Give back the library and the files."""
        self._gpus.close()
        for run in self._runs.values():
            run.close()

    def _devices(self) -> list[dict[str, Any]]:
        now, readings = now_ns(), {(what, key): value for what, key, value in self._gpus.sample()}
        elapsed_s = (now - self._before_ns) / 1e9
        known = self._gpus.state()["devices"]
        assert isinstance(known, list)
        devices = []
        for described in known:
            device = dict(described)
            for (what, key), value in readings.items():
                if key != device["key"]:
                    continue
                quantity = quantity_of(what)
                if quantity in _LEVELS:
                    device[_LEVELS[quantity]] = value
                elif quantity == "throttle":
                    device["throttles"] = throttles(value, self._gpus.vendor)
                elif quantity in _RATES and (what, key) in self._before and elapsed_s > 0:
                    device[_RATES[quantity]] = max(0, value - self._before[what, key]) / elapsed_s
            devices.append(device)
        self._before, self._before_ns = readings, now
        return devices

    def _host(self) -> dict[str, Any]:
        bounds = [{"name": bound.name, "free_nbytes": bound.free} for bound in self._machine.memory_bounds()]
        try:
            total = re.search(r"^MemTotal:\s+(\d+) kB$", (self._machine.root / "proc/meminfo").read_text(), re.MULTILINE)
        except OSError:
            total = None
        return {"total_nbytes": int(total[1]) << 10 if total else None, "bounds": bounds}

    def _find_runs(self) -> None:
        recent = wall_ns() - _RECENT_NS
        found = 0
        for path in sorted(self._folder.glob("*.zprof")):
            try:
                changed = path.stat().st_mtime_ns
            except OSError:
                continue
            if changed < recent or path in self._runs:
                continue
            found += 1
            if found > _MOST_FOUND:
                return
            self._try_to_follow(path)

    def _follow(self, path: Path) -> None:
        # Late: it needs numpy, which costs more than all of a start.
        from zprof.analysis.following import RunFollower

        self._runs[path] = RunFollower(path)

    def _seen(self, path: Path) -> Seen | None:
        try:
            seen = self._runs[path].look()
        except TraceError as error:
            # A new run under the old name: followed from its beginning at the next look.
            self._problems[path] = str(error)
            self._runs.pop(path).close()
            if not self._find:
                self._try_to_follow(path)
            return None
        # What was only found is shown while it records; a file that was asked for, always.
        return None if self._find and seen.state != "recording" else seen

    def _try_to_follow(self, path: Path) -> None:
        try:
            self._follow(path)
        except TraceError as error:
            self._problems[path] = str(error)
        else:
            self._problems.pop(path, None)
