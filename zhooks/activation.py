"""What autograd saves: gathered parameters pass as references, everything else is left alone.

``runtime.py`` enters it around a forward whose units will be released.  A reference costs no memory; when backward asks
for it the unit is gathered again, whatever module hooks saw or missed.  It never keeps a gathered buffer alive.

Note: [Hook pairs nest]
    torch calls only the innermost pair of saved-tensor hooks, so ours hands what is not a parameter to the pair outside
    it (the user's ``save_on_cpu``, a checkpoint around the model) and takes the version check over from torch, which
    skips it for hooked tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from zhooks.flat import Flat

Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclass(frozen=True, slots=True)
class Reference:
    """A view of a gathered buffer that autograd saved: identity is offset, size and stride of the flat's storage."""

    flat: Flat
    version: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedParameters:
    """The saved-tensor hooks of one attachment."""

    def __init__(self, gather: Callable[[Flat], None]) -> None:
        self._gather = gather
        self._outer: Pair | None = None
        self._live: dict[int, Flat] = {}

    def live(self, flat: Flat) -> None:
        """``flat`` has just been gathered: tensors on its storage are its parameters."""
        if flat.full is not None:
            self._live[torch._C._storage_address(flat.full)] = flat  # type: ignore[attr-defined]

    def forget(self) -> None:
        """All buffers are laid out anew."""
        self._live.clear()

    def gone(self, flat: Flat) -> None:
        """``flat`` is about to be released."""
        if flat.full is not None:
            self._live.pop(torch._C._storage_address(flat.full), None)  # type: ignore[attr-defined]

    def enter(self) -> None:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._outer = cast("Pair | None", tuple(outer)) if outer is not None else None
        torch._C._autograd._push_saved_tensors_default_hooks(*self._pair(self._outer))

    def exit(self) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pair(self, outer: Pair | None) -> Pair:
        live, address = self._live, torch._C._storage_address  # type: ignore[attr-defined]

        def pack(tensor: Tensor) -> Any:
            flat = live.get(address(tensor)) if type(tensor) is Tensor else None
            if flat is not None:
                return Reference(
                    flat, flat.version(), tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
                )
            if outer is not None:
                return outer[0](tensor)
            return tensor.detach(), tensor._version

        def unpack(packed: Any) -> Tensor:
            if type(packed) is Reference:
                return self._restore(packed)
            if outer is not None:
                return outer[1](packed)
            tensor, version = packed
            if tensor._version != version:
                raise _modified(f"tensor of shape {list(tensor.shape)}", tensor._version, version)
            return cast(Tensor, tensor)

        return pack, unpack

    def _restore(self, reference: Reference) -> Tensor:
        flat = reference.flat
        if flat.version() != reference.version:
            raise _modified(f"parameter of unit {flat.name}", flat.version(), reference.version)
        self._gather(flat)
        assert flat.full is not None
        with torch.inference_mode(False):
            empty = torch.empty(0, dtype=reference.dtype, device=flat.full.device)
            storage = flat.full.untyped_storage()
            return empty.set_(storage, reference.offset, reference.shape, reference.stride)


def _modified(what: str, found: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{what}] is at version {found}; expected version {expected} instead."
    )
