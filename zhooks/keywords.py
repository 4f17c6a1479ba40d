"""What ``attach`` says to a keyword that it does not have: a key of the policy, say, or an argument of another library.

`attach.py` wraps ``attach`` in `explained`.  It never passes a keyword on, and changes no signature.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from offload.documents import nearest, tables_of
from offload.policy import Policy

__all__ = ["ELSEWHERE", "explained"]

P = ParamSpec("P")
R = TypeVar("R")

#: The longest value that is repeated.
_LONGEST = 40

_STAGE = 'policy={"stage": 3}'
_HOST = 'policy={"optimizer": {"tier": "host"}}, also for "parameter", "gradient" and "activation"'
_DTYPES = 'policy={"precision": {"param": "bf16"}}'
_MOVED = "Move the model first: model.to(device)"
_UNITS = 'policy={"units": {"classes": ["Block"]}}'
#: Arguments of FSDP, FSDP2, DeepSpeed and DistributedDataParallel -> what to write here.
ELSEWHERE = {
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
}


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; of a keyword that it does not have, its TypeError also says where that belongs."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in known:
                said = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{said}. {_instead(name, value, list(known))}")
        return function(*args, **kwargs)

    return call


def _instead(name: str, value: object, known: list[str]) -> str:
    """What to write in place of ``name``, in a sentence."""
    near = nearest(name, known, 0.7)
    if near is not None:
        return f"Did you mean {near}?"
    if name in ELSEWHERE:
        return f"{ELSEWHERE[name]}."
    places = _places(name, value)
    if not places:
        return f"Expected {', '.join(known[:-1])} or {known[-1]}; all else is set by the policy."
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
