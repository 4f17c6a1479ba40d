"""What ``attach`` and the methods of an ``Attachment`` say to a keyword that they do not have: a key of the policy, say, or an
argument of another library.

`attach.py` wraps ``attach`` in `explained`, and ``Attachment`` in `explained_methods`.  It never passes a keyword on, and
changes no signature.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from offload.documents import nearest, tables_of
from offload.policy import Policy

__all__ = ["ELSEWHERE", "explained", "explained_methods"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")

#: The longest value that is repeated.
_LONGEST = 40

_STAGE = 'policy={"stage": 3}'
_HOST = 'policy={"optimizer": {"tier": "host"}}, also for "parameter", "gradient" and "activation"'
_DTYPES = 'policy={"precision": {"param": "bf16"}}'
_MOVED = "Move the model first: model.to(device)"
_UNITS = 'policy={"units": {"classes": ["Block"]}}'
_PART = (
    "All of the model is loaded, by name and shape. To load only some tensors, with full values, call "
    "model.load_state_dict(state, strict=False) on every rank"
)
_MODEL_ALONE = "Write optimizer=() to load the model alone"
_OBJECTS = 'Write objects={"scheduler": scheduler}'
_EXTRA = 'Write extra={"step": step}'
#: Function -> arguments that torch, FSDP, DeepSpeed or transformers have there -> what to write here.
ELSEWHERE = {
    "attach": {
        "activation_checkpointing": 'Write policy={"activation": {"checkpoint": "unit"}}',
        "auto_wrap_policy": f"Write {_UNITS}",
        "config": "Write policy=, which also takes a DeepSpeed configuration",
        "cpu_offload": f"Write {_HOST}",
        "device": _MOVED,
        "device_id": _MOVED,
        "device_ids": _MOVED,
        "device_mesh": "Write mesh=",
        "ignored_params": 'Write policy={"units": {"ignore": ["*.name"]}}',
        "mixed_precision": f"Write {_DTYPES}",
        "mp_policy": f"Write {_DTYPES}",
        "offload": f"Write {_HOST}",
        "offload_optimizer": 'Write policy={"optimizer": {"tier": "host"}}',
        "offload_param": 'Write policy={"parameter": {"tier": "host"}}',
        "offload_policy": f"Write {_HOST}",
        "param_init_fn": "Write init=",
        "process_group": "Write mesh=, a DeviceMesh over the whole process group",
        "sharding_strategy": f"Write {_STAGE}",
        "sync_module_states": "Write sync=",
        "zero_stage": f"Write {_STAGE}",
    },
    "Attachment.gathered": {
        "modifier_rank": "Write write=True to keep the changes of rank 0",
        "params": "Pass them by position",
    },
    "Attachment.load": {
        "load_lr_scheduler_states": _OBJECTS,
        "load_module_only": _MODEL_ALONE,
        "load_module_strict": _PART,
        "load_optimizer_states": _MODEL_ALONE,
        "lr_scheduler": _OBJECTS,
        "map_location": "Drop it: each rank reads its shards to where the policy stores them",
        "scheduler": _OBJECTS,
        "strict": _PART,
        "tag": "Make it a part of the folder's path",
        "weights_only": "Drop it: nothing in a checkpoint is ever run",
    },
    "Attachment.load_state_dict": {
        "assign": "Drop it: values are copied into the shards",
        "strict": _PART,
    },
    "Attachment.save": {
        "client_state": "Write extra=",
        "epoch": _EXTRA,
        "lr_scheduler": _OBJECTS,
        "model": "Drop it: the attached model is saved",
        "scheduler": _OBJECTS,
        "step": _EXTRA,
        "tag": "Make it a part of the folder's path",
    },
    "Attachment.save_pretrained": {
        "is_main_process": "Drop it, and call save_pretrained on every rank",
        "processing_class": "Write tokenizer=",
        "push_to_hub": "Upload the folder from one rank once it is written",
        "safe_serialization": "Drop it: safetensors are always written",
        "state_dict": "Drop it: values are gathered as they are written",
        "torch_dtype": "Write dtype=",
    },
}


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; of a keyword that it does not have, its TypeError also says where that belongs."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    every = inspect.signature(function).parameters.items()
    known = [name for name, parameter in every if parameter.kind in kinds and name != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in known:
                said = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{said}. {_instead(function.__qualname__, name, value, known)}")
        return function(*args, **kwargs)

    return call


def explained_methods(owner: type[C]) -> type[C]:
    """The same class, with public methods that are ``explained``."""
    for name, method in inspect.getmembers(owner, inspect.isfunction):
        if not name.startswith("_"):
            setattr(owner, name, explained(method))
    return owner


def _instead(function: str, name: str, value: object, known: list[str]) -> str:
    """What to write in place of ``name``, in a sentence."""
    elsewhere = ELSEWHERE.get(function, {})
    if name in elsewhere:
        return f"{elsewhere[name]}."
    near = nearest(name, known, 0.7)
    if near is not None:
        return f"Did you mean {near}?"
    places = _places(name, value) if "policy" in known else []
    if not places:
        names = " or ".join(filter(None, [", ".join(known[:-1]), *known[-1:]]))
        listed = f"Expected {names}" if names else "It takes none"
        return f"{listed}; all else is set by the policy." if "policy" in known else f"{listed}."
    asked, *others = places
    also = f", also for {' and '.join(others)}" if others else ""
    return f"It is a key of the policy: policy={asked}{also}."


def _places(name: str, value: object) -> list[str]:
    """The policy that sets this key, as a dict; then the further tables that have a key of this name."""
    plain = isinstance(value, (bool, int, float, str)) and len(str(value)) <= _LONGEST
    written = (json.dumps(value) if isinstance(value, str) else repr(value)) if plain else "..."
    tables = tables_of(Policy)
    if name in Policy.model_fields:
        return [_set(name, "{...}" if name in tables else written)]
    inside = [key for key, table in tables.items() if name in table.model_fields]
    return [_set(inside[0], f'{{"{name}": {written}}}'), *inside[1:]] if inside else []


def _set(key: str, value: str) -> str:
    """The policy of one key, where ``value`` is, or is one table of an array of them."""
    return f'{{"{key}": [{value}]}}' if isinstance(Policy.model_fields[key].default, tuple) else f'{{"{key}": {value}}}'
