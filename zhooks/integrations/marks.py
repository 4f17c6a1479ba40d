"""What the libraries look for on a model whose gradients and parameters somebody else takes care of.

``accelerate.py`` puts it there after attach.  In a deep copy of the model (an average of weights) ``no_sync`` does nothing; the
marks are copied, as its parameters are sharded too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from zhooks import tree
from zhooks.attach import Attachment
from zhooks.run import Before

#: transformers lets ranks that generate, or that drop layers, wait for each other where a module says the first; Dynamo refuses
#: to trace a module that says it without the second.
SYNCHRONISED = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
#: Where Accelerate and Trainer look for a context in which gradients are added up.
NO_SYNC = "no_sync"


class NoSync:
    """``model.no_sync()``, which Accelerate and Trainer enter for every backward but the last before a step."""

    def __init__(self, attachment: Attachment | None) -> None:
        self._attachment = attachment

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext() if self._attachment is None else self._attachment.no_sync()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoSync:
        return NoSync(None)

    def __reduce__(self) -> Any:
        return NoSync, (None,)


def mark(model: nn.Module, attachment: Attachment) -> None:
    """Let Accelerate and transformers see that ``model`` is attached."""
    # In a world of one there is nobody to wait for, and no process group to ask.
    for module in _around_units(model) if dist.is_initialized() and dist.get_world_size() > 1 else ():
        for name in SYNCHRONISED:
            setattr(module, name, True)
    bare: Any = model
    bare.no_sync, bare._is_accelerate_prepared = NoSync(attachment), True


def _around_units(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and the modules that call units: a rank may call fewer.  What is inside a unit compiles as if unmarked."""
    for module in tree.modules(model):
        if module is model or any(inner is not module and _entered(inner) for inner in tree.modules(module)):
            yield module


def _entered(module: nn.Module) -> bool:
    return any(isinstance(hook, Before) for hook in module._forward_pre_hooks.values())


def unmark(model: nn.Module) -> None:
    """Take the marks away."""
    for module in tree.modules(model):
        for name in SYNCHRONISED:
            vars(module).pop(name, None)
    for name in (NO_SYNC, "_is_accelerate_prepared"):
        vars(model).pop(name, None)
