"""What ``attach`` and the methods of an ``Attachment`` say to a keyword that they do not have: a key of the policy, say, or an
argument of FSDP2 or DeepSpeed.
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

_PART = (
    "All of the model is loaded, by name and shape. To load only some tensors, with full values, call "
    "model.load_state_dict(state, strict=False) on every rank"
)
_MODEL_ALONE = "Write optimizer=() to load the model alone"
_OBJECTS = 'Write objects={"scheduler": scheduler}'
_TAG = "Make it a part of the folder's path"
#: Function -> arguments that FSDP2 or DeepSpeed have there -> what to write here.
ELSEWHERE = {
    "attach": {
        "config": "Write policy=, which also takes a DeepSpeed configuration",
        "ignored_params": 'Write policy={"units": {"ignore": ["*.name"]}}',
        "mp_policy": 'Write policy={"precision": {"param": "bf16"}}',
        "offload_policy": 'Write policy={"optimizer": {"tier": "host"}}, also for "parameter", "gradient" and "activation"',
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
        "strict": _PART,
        "tag": _TAG,
    },
    "Attachment.load_state_dict": {"strict": _PART},
    "Attachment.save": {"client_state": "Write extra=", "tag": _TAG},
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
