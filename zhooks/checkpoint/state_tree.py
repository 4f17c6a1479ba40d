"""State dicts as JSON and tensors, without pickle: what a scheduler, a scaler or an optimizer's group says of itself.  The
tensors go to the shard file beside the JSON."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CODES, DTYPES
from zhooks.tensor import ShardedTensor, ShardedVector

_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "deque": deque}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_PLAIN = (str, int, float, bool)


class Packer:
    """Turns values into JSON; ``tensors`` collects what shall be written beside it, by name.

    Args:
        verb: who packs, for errors.
    """

    def __init__(self, verb: str = "save") -> None:
        self._verb = verb
        self.tensors: dict[str, Tensor] = {}

    def pack(self, value: Any, where: str) -> Any:
        """``value`` as JSON; ``where`` names it in errors.

        Raises:
            CheckpointError: it holds something else than plain data and plain tensors.
        """
        if value is None or isinstance(value, bool):
            return value
        for kind in (str, int, float):
            if isinstance(value, kind):
                # A subclass (a numpy scalar, an enum's value) goes as what it is a kind of.
                return kind(value)
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if isinstance(value, list):
            return [self.pack(item, f"{where}[{index}]") for index, item in enumerate(value)]
        for tag, made in (("tuple", tuple), ("set", set), ("deque", deque)):
            if isinstance(value, made):
                return {tag: [self.pack(item, f"{where}[{index}]") for index, item in enumerate(value)]}
        if isinstance(value, dict):
            tag = {Counter: "counter", OrderedDict: "ordered"}.get(type(value), "dict")
            return {tag: [[self.pack(key, where), self.pack(item, f"{where}[{key!r}]")] for key, item in value.items()]}
        raise CheckpointError(
            f"{self._verb} expected numbers, strings, lists, tuples, dicts and tensors in {where}, found "
            f"{type(value).__name__}. Leave it out of the state, or save it separately."
        )

    def _tensor(self, value: Tensor, where: str) -> Any:
        if isinstance(value, ShardedVector):
            name = f"tree/{len(self.tensors)}"
            self.tensors[name] = value.to_local()
            return {"vector": name, "device": value.to_local().device.type, "parts": [part.name for part in value.parts]}
        made_of = hasattr(value, "__tensor_flatten__") and not isinstance(value, ShardedTensor)
        if isinstance(value, ShardedTensor) or made_of or value.layout is not torch.strided or value.dtype not in CODES:
            what = "a sharded tensor" if isinstance(value, ShardedTensor) else f"a {value.layout} tensor of {value.dtype}"
            what = f"a {type(value).__name__}" if made_of else what
            raise CheckpointError(
                f"{self._verb} expected plain dense tensors in {where}, found {what}. Save its full_tensor(), or leave it out."
            )
        device = value.device.type
        if value.dim() == 0 and not value.is_complex():
            return {"scalar": value.item(), "dtype": CODES[value.dtype], "device": device}
        name = f"tree/{len(self.tensors)}"
        strides = value.stride()
        order = sorted(range(value.dim()), key=lambda dim: (-strides[dim], dim))
        if value.is_contiguous() or not value.permute(order).is_contiguous():
            self.tensors[name] = value
            return {"tensor": name, "device": device}
        # As it lies in memory (a result of eigh, by columns): products would round otherwise once it is read back.
        self.tensors[name] = value.permute(order)
        return {"tensor": name, "device": device, "order": order}


class Unpacker:
    """Turns the JSON back; ``read`` gives a tensor by name, and what was not on the CPU goes to ``device``.

    ``vectors`` makes a vector of these parameters' ranges of what lies under a name.
    """

    def __init__(
        self,
        read: Callable[[str], Tensor],
        device: torch.device,
        vectors: Callable[[str, list[str]], ShardedVector] | None = None,
    ) -> None:
        self._read, self._device, self._vectors = read, device, vectors

    def unpack(self, packed: Any) -> Any:
        """The value.

        Raises:
            CheckpointError: the JSON is none that ``pack`` made.
        """
        if packed is None or isinstance(packed, _PLAIN):
            return packed
        if isinstance(packed, list):
            return [self.unpack(item) for item in packed]
        if isinstance(packed, dict) and "tensor" in packed:
            return self._placed(_ordered(self._read(str(packed["tensor"])), packed.get("order")), packed)
        if isinstance(packed, dict) and "vector" in packed:
            return self._vector(packed)
        if isinstance(packed, dict) and "scalar" in packed:
            return self._placed(torch.tensor(packed["scalar"], dtype=DTYPES[packed["dtype"]], device="cpu"), packed)
        if isinstance(packed, dict) and len(packed) == 1:
            tag, items = next(iter(packed.items()))
            if tag in _SEQUENCES:
                return _SEQUENCES[tag]([self.unpack(item) for item in items])
            if tag in _MAPPINGS:
                return _MAPPINGS[tag]([(self.unpack(key), self.unpack(item)) for key, item in items])
        raise CheckpointError(f"load expected a packed state, found {str(packed)[:80]}. The checkpoint is damaged.")

    def _vector(self, packed: dict[str, Any]) -> ShardedVector:
        if self._vectors is None:
            raise CheckpointError(f"load expected plain states, found a vector of {str(packed['parts'])[:80]}. It is damaged.")
        found = self._vectors(str(packed["vector"]), packed["parts"])
        return found if packed["device"] == "cpu" else ShardedVector(found.to_local().to(self._device), found.local_shard.spec)

    def _placed(self, tensor: Tensor, packed: dict[str, Any]) -> Tensor:
        return tensor if packed["device"] == "cpu" else tensor.to(self._device)


def _ordered(tensor: Tensor, order: Any) -> Tensor:
    """A tensor that was written in this order of its dims, in its own."""
    if order is None:
        return tensor
    if not isinstance(order, list) or sorted(order) != list(range(tensor.dim())):
        found = str(order)[:80]
        raise CheckpointError(f"load expected an order of {tensor.dim()} dims, found {found}. The checkpoint is damaged.")
    return tensor.permute(sorted(range(tensor.dim()), key=order.__getitem__))
