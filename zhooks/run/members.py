"""Which modules and parameters an attachment has, what was registered among them since, and who must not wrap them.

torch calls it for every module and parameter that is registered anywhere; ``runtime.py`` asks it as a pass begins.  It never
changes a module.

Note: [What came later]
    Only what was attached is gathered, reduced and saved.  A parameter that is registered afterwards would train apart on
    every rank, so the next pass is refused; where a forward made it, that forward as it ends.  torch's registration hooks
    tell of it at no cost to a pass; what is written past them (``module._modules[name] = ...``) is found by a walk, at the
    first two passes and after a freeze.  A parameter that is attached may appear in a second place: it is the same tensor
    there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from offload.errors import AttachError
from zhooks import tree
from zhooks.layout import FrozenSubclass, Ignored
from zhooks.tensor import ShardedTensor

__all__ = ["Members", "wrapper"]

#: Whose module it is, by the module's identity.
_of: dict[int, weakref.ref[Members]] = {}
_open: weakref.WeakSet[Members] = weakref.WeakSet()
_handles: list[RemovableHandle] = []


class Members:
    """The modules of one attached model, as torch tells of changes to them."""

    def __init__(self, model: nn.Module, ignored: Ignored) -> None:
        self._model, self._ignored = model, ignored
        self._modules: dict[int, nn.Module] = {}
        # Forgets them where a model is dropped that was never detached.
        self._end: weakref.finalize[..., Members] | None = None
        self._attached: list[nn.Module] = []
        self._places: frozenset[tuple[int, str]] = frozenset()
        #: Of tensor subclasses: what attach left as it is because it was frozen.
        self._left = {name: one for name, one in ignored.frozen.items() if name in ignored.unnamed}
        self._frozen: list[tuple[str, nn.Parameter]] = []
        #: Something may have come since the last look.
        self.changed = True
        #: Why no pass may begin.
        self.barred: str | None = None

    def open(self) -> None:
        """Hear of what is registered from now on."""
        if not _handles:
            _handles.append(register_module_module_registration_hook(_module_registered))
            _handles.append(register_module_parameter_registration_hook(_parameter_registered))
        _open.add(self)
        self._attached = [module for _, module in self._ignored.named_modules(self._model)]
        self._places = frozenset((id(module), name) for module in self._attached for name in module._parameters)
        self._take()

    def close(self) -> None:
        """The modules are nobody's again."""
        _open.discard(self)
        self._forget()
        self._modules, self._attached, self._places = {}, [], frozenset()
        if not _open:
            while _handles:
                _handles.pop().remove()

    def check(self) -> None:
        """A pass begins.

        Raises:
            AttachError: the model has a trainable parameter that was not attached, or is half detached.
        """
        if self.barred is not None:
            raise AttachError(self.barred)
        if any(one.param.requires_grad for one in self._left.values()):
            raise _unfrozen(self._left)
        if not self.changed:
            if any(param.requires_grad for _, param in self._frozen):
                raise _stranger([(name, param) for name, param in self._frozen if param.requires_grad])
            return
        self._frozen, self.changed = self._checked(), False
        self._take()

    def check_new(self) -> None:
        """A forward has run, or a backward begins: a parameter made in that forward shall not get a gradient of one rank.

        Raises:
            AttachError: there is one.
        """
        if self.changed:
            self._checked()

    def _checked(self) -> list[tuple[str, nn.Parameter]]:
        """The plain parameters, all of them frozen."""
        found = list(self._strangers())
        training = [(name, param) for name, param in found if param.requires_grad]
        if training:
            raise _stranger(training)
        return found

    def _strangers(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Plain parameters; one that is in the place of one that was attached is its unit's to refuse."""
        for path, module in self._ignored.named_modules(self._model):
            for name, param in module._parameters.items():
                if param is not None and not isinstance(param, ShardedTensor) and (id(module), name) not in self._places:
                    yield f"{path}.{name}".lstrip("."), param

    def _take(self) -> None:
        """Every module of the model is watched, those that came without parameters too."""
        self._forget()
        self._modules = {id(module): module for _, module in self._ignored.named_modules(self._model)}
        me = weakref.ref(self)
        for number in self._modules:
            _of[number] = me
        self._end = weakref.finalize(self, _forget, tuple(self._modules))

    def _forget(self) -> None:
        if self._end is not None:
            self._end()


def _forget(numbers: tuple[int, ...]) -> None:
    for number in numbers:
        _of.pop(number, None)


def _whose(module: nn.Module) -> Members | None:
    known = _of.get(id(module))
    members = None if known is None else known()
    return members if members is not None and members._modules.get(id(module)) is module else None


def _module_registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    around = wrapper(parent)
    if around is not None and child is not None and any(_whose(module) is not None for module in tree.modules(child)):
        raise AttachError(
            f"{around} expected a plain model, found an attached one, whose gradients attach reduces already: {around} would "
            f"see none of them. Train the attached model without {around} (in Lightning, Accelerate or Ray: without their "
            "wrapping of the model), or detach() it first."
        )
    members = _whose(parent)
    if members is not None:
        members.changed = True


def _parameter_registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    members = _whose(module)
    if members is not None:
        members.changed = True


def wrapper(module: nn.Module) -> str | None:
    """The name of what ``module`` is, if it trains the model inside it over several ranks or devices; None if it does not."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "DistributedDataParallel" if isinstance(module, nn.parallel.DistributedDataParallel) else "DataParallel"
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for name, said in (("FullyShardedDataParallel", "FullyShardedDataParallel"), ("FSDPModule", "fully_shard")):
        kind = getattr(fsdp, name, None)
        if isinstance(kind, type) and isinstance(module, kind):
            return said
    return None


def _unfrozen(left: Mapping[str, FrozenSubclass]) -> AttachError:
    name, one = next((name, one) for name, one in left.items() if one.param.requires_grad)
    return AttachError(
        f"Parameter {name} was unfrozen. Expected it to stay frozen, found requires_grad = True: attach left it as it is "
        f"({one.kind} cannot be sharded), and each rank would train its own. Call requires_grad_(False); or detach(), make it "
        "a plain parameter, and attach again."
    )


def _stranger(found: list[tuple[str, nn.Parameter]]) -> AttachError:
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return AttachError(
        f"Parameter {found[0][0]}{more} is not attached. Expected the parameters that were attached, found one that was added "
        "since (by an adapter, a new module, an assignment, a forward): each rank would train its own, and no checkpoint "
        "would hold it. Call detach(), add it, attach again; or set its requires_grad to False. A parameter that the first "
        "forward makes needs one forward before attach."
    )
