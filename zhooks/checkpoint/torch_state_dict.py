"""What torch's own state functions find at an attached model: ``load_state_dict`` of the model and of its optimizers, and
``torch.distributed.checkpoint.state_dict`` where it is asked for full values.

``session/open.py`` opens one an attachment.  Loading is compared over the ranks before anything is changed;
``optim/optimizers.py`` says when full tensors that an optimizer was given become ranges.  It never writes a file: what a file
of ranges would be, ``tensor/range_tensor.py`` refuses.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offload.errors import CapabilityError, CheckpointError
from zhooks.checkpoint.full_optimizer_state import make_whole
from zhooks.checkpoint.ignored_values import check_alike
from zhooks.checkpoint.rank0_values import whole_values
from zhooks.comm import Comm, ControlPlane
from zhooks.grad import Asked, full_state_asked
from zhooks.layout import Ignored, flats_of
from zhooks.optim import about_state, of_another_layout
from zhooks.run import Inert
from zhooks.tensor import ShardedTensor
from zhooks.unit import Unit

__all__ = ["StockState"]


class StockState:
    """One attachment's answer to torch's state functions.

    Args:
        units: the attachment's own list.
        ignored: what of the model stays as it is.
        finish_backward: finishes a backward that is still open.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], comm: Comm, finish_backward: Callable[[], None], ignored: Ignored
    ) -> None:
        self._ignored = ignored
        self._model, self._units, self._comm, self._finish_backward = model, units, comm, finish_backward
        self._watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        """Be called by every ``state_dict`` and ``load_state_dict`` of the model from now on."""
        for _, module in self._ignored.named_modules(self._model):
            root = module is self._model
            self._handles.append(module.register_load_state_dict_pre_hook(Loading(self, root=root)))
            self._handles.append(module.register_state_dict_post_hook(Saving(self, root=root)))

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._watched.clear()

    # Into the model.

    def loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *, assign: bool) -> None:
        """The state dict of ``module`` is about to be loaded; of ranges of another layout it gets the whole.  Collective.

        Raises:
            CheckpointError: parameters would be replaced, or ranks load different states; nothing has been changed.
        """
        if assign or torch.__future__.get_swap_module_params_on_conversion():
            how = "assign=True" if assign else "torch.__future__.set_swap_module_params_on_conversion(True)"
            raise CheckpointError(
                f"load_state_dict expected values to be copied into the parameters, found {how}, which would replace them "
                "with parameters that are not sharded. Load without it, or load before attach."
            )
        self._finish_backward()
        ranks = ControlPlane(self._comm.stage, "load_state_dict", "the model")
        named = dict(module.state_dict(keep_vars=True))
        # What is ignored is copied as torch does it, and may differ from rank to rank.
        left = self._ignored.identities() | self._ignored.buffers()
        named = {name: value for name, value in named.items() if id(value) not in left}
        given = {name: state[prefix + name] for name in named if isinstance(state.get(prefix + name), Tensor)}
        if not ranks.agree("\n".join(f"{name} {about_state(value)}" for name, value in given.items())):
            raise CheckpointError(
                "load_state_dict expected every rank to load a state dict with the same names, shapes and dtypes, found "
                "that they differ. Load the same file on all ranks, or pass rank 0's to attachment.load_state_dict({'model': "
                "...})."
            )
        ranges = [(name, value, named[name]) for name, value in given.items() if _both_sharded(value, named[name])]
        for name, value in of_another_layout(ranges, self._comm.stage):
            state[prefix + name] = value

    # Into an optimizer.

    def check_autocast(self) -> None:
        """Accelerate wraps autocast around a model it prepares, and around none that is marked as prepared already."""
        accelerate: Any = sys.modules.get("accelerate.state")
        about = vars(self._model)
        if accelerate is None or not about.get("_is_accelerate_prepared") or "_original_forward" in about:
            return
        asked = accelerate.AcceleratorState._shared_state.get("_mixed_precision")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": None}.get(str(asked), torch.float32)
        if dtype is torch.float32 or any(flat.kind.compute is dtype for flat in flats_of(self._units)):
            return
        raise CapabilityError(
            f'Accelerate (or Trainer) with mixed_precision = "{asked}" expected its autocast around the attached model, found '
            "the model marked as prepared (_is_accelerate_prepared), which Accelerate leaves in the dtype it has. Set it in "
            'the policy ([precision] param = "bf16"), or set mixed_precision = "no" (Trainer: bf16=False).'
        )

    def watch(self, optimizer: Optimizer) -> None:
        """Be called by its ``state_dict`` from now on."""
        if optimizer in self._watched:
            return
        self._watched.add(optimizer)
        me = weakref.ref(self)

        def whole(found: Optimizer, state: dict[str, Any]) -> None:
            stock, asked = me(), full_state_asked(sys._getframe())
            if stock is not None and asked is not None:
                stock.whole_states(found, state, asked)

        self._handles.append(optimizer.register_state_dict_post_hook(whole))

    # Out of both, where full values are asked for.

    def whole_model(self, state: dict[str, Any], asked: Asked) -> None:
        """Put whole values in place of ranges in the state dict of the model or of a module of it.  Collective."""
        self._finish_backward()
        check_alike(self._model, self._ignored, self._comm, "state_dict")
        names: dict[int, list[str]] = {}
        for name, value in state.items():
            if isinstance(value, ShardedTensor):
                names.setdefault(id(value._spec), []).append(name)
        for flat in flats_of(self._units):
            wanted = [index for index, spec in enumerate(flat.specs) if id(spec) in names]
            if wanted:
                here = wanted if asked.here else ()
                values = whole_values(flat, flat.shard, here, asked.device or flat.kind.device)
                for spec, value in zip(flat.specs, values, strict=True):
                    if value is not None:
                        state.update(dict.fromkeys(names[id(spec)], value))

    def whole_states(self, optimizer: Optimizer, packed: dict[str, Any], asked: Asked) -> None:
        """Put whole values in place of ranges in an optimizer's state dict, never in its own states.  Collective."""
        self._finish_backward()
        check_alike(self._model, self._ignored, self._comm, "state_dict", optimizer)
        every = range(self._comm.shard.axis.world)
        make_whole(optimizer, packed["state"], self._units, self._comm, every, asked.device, here=asked.here)


class _Hook:
    """Calls an attachment's StockState for the outermost module of a call; a copied model has nothing in its place."""

    def __init__(self, stock: StockState, *, root: bool) -> None:
        # Whoever wraps the hook copies its attributes: they must not keep an attachment.
        self._stock, self._root = weakref.ref(stock), root

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> Any:
        return Inert, ()

    def _meant(self, prefix: str) -> StockState | None:
        """Inside a call for the whole attached model, its other modules are not asked again."""
        return self._stock() if self._root or not prefix else None


class Loading(_Hook):
    """Before a module's ``load_state_dict``."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, about: Mapping[str, Any], *_: Any) -> None:
        stock = self._meant(prefix)
        if stock is not None:
            stock.loading(module, state, prefix, assign=bool(about.get("assign_to_params_buffers")))


class Saving(_Hook):
    """After a module's ``state_dict``."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, about: Mapping[str, Any]) -> None:
        stock = self._meant(prefix)
        asked = None if stock is None else full_state_asked(sys._getframe())
        if stock is not None and asked is not None:
            stock.whole_model(state, asked)


def _both_sharded(one: Any, other: Any) -> bool:
    return isinstance(one, ShardedTensor) and isinstance(other, ShardedTensor)
