"""What an attached model of transformers answers to its own ``save_pretrained``: a refusal before any file is written.

`attach.py` opens and closes it.  transformers writes configurations first, and only then meets, in the weights, what refuses
to be written: what it left looked like a checkpoint.  Whole values that it is handed, or that are there inside ``gathered``, it
writes as ever.  Nothing here writes or communicates.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn

from zhooks import tree
from zhooks.tensor import ShardedTensor, range_alone

__all__ = ["StockFolders"]

_VERB = "save_pretrained"


class StockFolders:
    """Stands before ``save_pretrained`` of every model of transformers in an attached one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def open(self) -> None:
        """Be asked first from now on."""
        stock: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        for module in () if stock is None else tree.modules(self._model):
            kind: Any = type(module)
            # One of the user's own may know about ranks.
            if isinstance(module, stock) and kind.save_pretrained is stock.save_pretrained:
                vars(module)[_VERB] = _SavePretrained(module)

    def close(self) -> None:
        """Idempotent."""
        for module in tree.modules(self._model):
            if isinstance(vars(module).get(_VERB), _SavePretrained):
                del vars(module)[_VERB]


class _SavePretrained:
    """``model.save_pretrained``; that of a copy of the model asks what the copy has."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __reduce__(self) -> Any:
        return type(self), (self._module(),)

    def __call__(self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any) -> Any:
        module: Any = self._module()
        held = dict(tree.named_parameters(module)) if state_dict is None else state_dict
        for value in held.values():
            if isinstance(value, ShardedTensor):
                raise range_alone("save", value)
        return type(module).save_pretrained(module, save_directory, is_main_process, state_dict, **kwargs)
