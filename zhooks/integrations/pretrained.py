"""A folder of transformers as an attached model: no rank ever holds more than its shards and one unit.

The model is made on meta from its configuration; ``attach`` gives each unit memory just before it shards it, and rank 0 fills
it from the safetensors files then, a bounded run of rows at a time, and sends it to the others.  ``from_pretrained`` in the
package's ``__init__`` calls it; it downloads nothing and never holds a file, or a tensor beside its unit, whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import CapabilityError, CheckpointError
from offload.policy import Policy
from offload.regular_files import open_regular, read_regular
from offload.text import shown_path
from offload.user_warnings import warn_user
from zhooks import tree
from zhooks.integrations import from_pretrained
from zhooks.integrations.required import require
from zhooks.plan import Request, read

require("transformers", "transformers", (5, 0))

from transformers import AutoConfig, GenerationConfig  # noqa: E402
from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: E402
from transformers.core_model_loading import (  # noqa: E402
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

__all__ = ["from_pretrained", "requested"]

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: An index names every tensor once; that of the largest published models is some MiB.
_MAX_INDEX_NBYTES = 64 << 20
#: Of a tensor so much is read at once, or one row.
_RUN_NBYTES = 8 << 20


def requested(
    cls: Any,
    folder: str | os.PathLike[str],
    policy: Policy | str | Path | dict[str, Any] | None,
    mesh: DeviceMesh | None,
    trainable: bool,
    changes: Mapping[str, Any],
) -> Request:
    """What ``zhooks.integrations.from_pretrained`` was asked to attach: a model on meta, and what fills it unit by unit.

    Raises:
        CheckpointError, CapabilityError: see there.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"from_pretrained expected a folder with config.json and safetensors, found {shown_path(path)}. "
            "Nothing is downloaded; give the path of one."
        )
    try:
        config, unknown = AutoConfig.from_pretrained(path, local_files_only=True, return_unused_kwargs=True, **changes)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"from_pretrained expected a config.json in {shown_path(path)}, found: {error}") from None
    if unknown:
        keys = _few(sorted(unknown))
        raise CheckpointError(f"from_pretrained expected keyword arguments of the configuration, found {keys}. Drop them.")
    make = getattr(cls, "_from_config", None) or getattr(cls, "from_config", None)
    if make is None:
        raise CheckpointError(
            f"from_pretrained expected a class of transformers, found {str(cls)[:100]}. Pass LlamaForCausalLM or the like, or "
            "an Auto class such as AutoModelForCausalLM."
        )
    with torch.device("meta"):
        model = make(config)
    _check_dtypes(model, config)
    # On a mesh other ranks than the first hand values on.
    first = mesh is not None or not dist.is_initialized() or dist.get_rank() == 0
    fill = _Filler(model, _Weights(path), reads=first)
    fill.check(cls.__name__)
    if model.can_generate() and (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return read(model.eval().requires_grad_(trainable), None, policy, mesh, fill, True)


def _check_dtypes(model: Any, config: Any) -> None:
    """Refuse what transformers would load in other dtypes than the model's.

    Raises:
        CapabilityError: quantised weights, or modules that are kept in fp32 beside 16-bit ones.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise CapabilityError(
            "from_pretrained expected weights that can be trained, found a quantization_config. Use a folder without one."
        )
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if config.dtype is torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    mixed = [(name, param.dtype) for name, param in tree.named_parameters(model) if kept & {*name.split(".")}]
    narrow = [name for name, dtype in mixed if dtype is not torch.float32]
    if narrow:
        raise CapabilityError(
            f"from_pretrained expected one dtype, found modules that {type(model).__name__} keeps in fp32 ({_few(narrow)}) "
            f"next to {config.dtype}. Pass dtype=torch.float32, and let the policy's [precision] cast."
        )


class _Weights:
    """The tensors of a folder, by name; the files are opened as they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            if (folder / _INDEX).exists():
                where = json.loads(read_regular(folder / _INDEX, _MAX_INDEX_NBYTES))["weight_map"]
            else:
                where = dict.fromkeys(self._open(_WEIGHTS).keys(), _WEIGHTS)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from None
        if not isinstance(where, Mapping) or any(Path(str(name)).name != name for name in where.values()):
            raise self._refusal(f"{_INDEX} that names files elsewhere")
        self.files: dict[str, str] = dict(where)

    def _refusal(self, found: str) -> CheckpointError:
        return CheckpointError(
            f"from_pretrained expected {_WEIGHTS} or {_INDEX} in {shown_path(self._folder)}, found {found[:300]}. "
            "Write them with save_pretrained."
        )

    def _open(self, name: str) -> Any:
        os.close(open_regular(self._folder / name))
        opened: Any = safe_open(self._folder / name, framework="pt")
        return opened.__enter__()

    def read(self, name: str) -> Tensor:
        try:
            file = self._open(self.files[name])
            value: Tensor = file.get_tensor(name)
        except (OSError, ValueError, SafetensorError) as error:
            raise self._refusal(str(error)) from None
        return value

    def like(self, name: str) -> Tensor:
        """A tensor of the same shape and dtype on meta."""
        try:
            stored = self._open(self.files[name]).get_slice(name)
            shape = stored.get_shape()
            value: Tensor = stored[:0].new_empty(shape, device="meta") if shape else self.read(name).to("meta")
        except (OSError, ValueError, SafetensorError) as error:
            raise self._refusal(str(error)) from None
        return value

    def copy(self, name: str, target: Tensor) -> None:
        """Read into ``target``, of the same shape, a run of rows at a time, cast on the way."""
        like = self.like(name)
        if like.dim() == 0:
            target.copy_(self.read(name))
            return
        rows = max(1, _RUN_NBYTES * like.shape[0] // max(1, like.nbytes))
        for start in range(0, like.shape[0], rows):
            # Opened anew: what is mapped of a file counts as this process' until it is closed.
            try:
                run = self._open(self.files[name]).get_slice(name)[start : start + rows]
            except (OSError, ValueError, SafetensorError) as error:
                raise self._refusal(str(error)) from None
            target[start : start + rows].copy_(run)


@dataclass(slots=True)
class _Recipe:
    """How one tensor of the model, or several at once, are made of tensors of the folder.

    Attributes:
        target: the name under which transformers' converter makes it.
        sources: what it is made of: name in the folder, and the converter's pattern that it matched.
        converter: None where the tensor is taken as it is.
    """

    target: str
    converter: WeightConverter | None
    sources: list[tuple[str, str]] = field(default_factory=list)

    def made(self, name: str, weights: _Weights, model: Any) -> Tensor:
        """The tensor ``name`` of the model."""
        if self.converter is None:
            return weights.read(self.sources[0][0])
        converter = deepcopy(self.converter)
        for source, pattern in self.sources:
            later: Any = partial(weights.read, source)
            converter.add_tensor(self.target, source, pattern, later)
        made = converter.convert(self.target, model=model, config=model.config)[name]
        value: Tensor = made[0] if isinstance(made, list) else made
        return value


def _recipes(model: Any, names: Iterable[str]) -> dict[str, _Recipe]:
    """What transformers makes of these names of a folder: for each tensor of the model, how.  No tensor is read."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    expected, prefix = model.state_dict(), model.base_model_prefix
    recipes: dict[str, _Recipe] = {}
    for source in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, expected)
        if name not in expected and source in expected:
            name, pattern = rename_source_key(source, [], [], prefix, expected)
        converter = None if pattern is None else by_pattern[pattern]
        # A converter may make several tensors at once.
        first = "" if converter is None else converter.target_patterns[0]
        targets = [name] if converter is None else [name.replace(first, other) for other in converter.target_patterns]
        recipe = recipes.get(name) or _Recipe(name, converter)
        recipe.sources.append((source, pattern or source))
        recipes.update((target, recipe) for target in targets if target in expected)
    return recipes


class _Filler:
    """Fills one module at a time: by the model's own rule, then from the folder."""

    def __init__(self, model: Any, weights: _Weights, *, reads: bool) -> None:
        self._model, self._weights = model, weights
        self._names = {id(module): name for name, module in tree.named_modules(model, remove_duplicate=False)}
        recipes = _recipes(model, weights.files)
        #: Name of a parameter or buffer -> the name it has in the folder, and how it is made of what is there.
        self._found = {
            name: [(other, recipes[other]) for other in names if other in recipes]
            for name, names in _aliases(model).items()
            if not recipes.keys().isdisjoint(names)
        }
        used = {source for recipe in recipes.values() for source, _ in recipe.sources}
        self._left, self._first = sorted(weights.files.keys() - used), reads

    def check(self, what: str) -> None:
        """Refuse a folder of another model, and say what it does not have.

        Raises:
            CheckpointError: see ``from_pretrained``.
        """
        expected = [name for name, _ in tree.named_parameters(self._model)]
        missing = [name for name in expected if name not in self._found]
        if len(missing) == len(expected):
            raise CheckpointError(
                f"from_pretrained expected the tensors of {what} in the folder ({_few(expected)}), found "
                f"{_few(sorted(self._weights.files))}. Use the class that the folder was saved from."
            )
        if missing:
            left = f"; tensors of the folder that are not used: {_few(self._left)}" if self._left else ""
            warn_user(
                f"from_pretrained: {what} has parameters that the folder lacks, now initialised: {_few(missing)}{left}"
            )

    def __call__(self, module: nn.Module) -> None:
        name = self._names[id(module)]
        mine = dict(_own(module, name))
        if any(key not in self._found for key in mine):
            self._model._init_weights(module)
        for key, tensor in mine.items() if self._first else ():
            if key not in self._found:
                continue
            (stored, recipe), *others = self._found[key]
            if recipe.converter is None and not others:
                source = recipe.sources[0][0]
                _check_value(key, self._weights.like(source), tensor)
                self._weights.copy(source, tensor)
                continue
            value = recipe.made(stored, self._weights, self._model)
            for other, how in others:
                if not torch.equal(how.made(other, self._weights, self._model), value):
                    raise CheckpointError(
                        f"from_pretrained expected {stored} and {other} to be one tensor, as the configuration ties them, "
                        "found two. Pass tie_word_embeddings=False."
                    )
            _check_value(key, value, tensor)
            tensor.copy_(value)


def _check_value(key: str, value: Tensor, tensor: Tensor) -> None:
    """Refuse what the folder has for a tensor of the model; only its shape and dtype are looked at."""
    if tensor.is_floating_point() and (not value.is_floating_point() or value.element_size() < 2):
        raise CapabilityError(
            f"from_pretrained expected {key} in fp32, bf16 or fp16, found {value.dtype} in the folder, which is "
            "quantised. Use a folder of weights that can be trained."
        )
    if value.shape != tensor.shape:
        raise CheckpointError(
            f"from_pretrained expected {key} of shape {tuple(tensor.shape)} as the configuration says, found "
            f"{tuple(value.shape)} in the folder. Use the configuration that the weights were saved with."
        )


def _own(module: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield f"{name}.{key}" if name else key, tensor


def _aliases(model: nn.Module) -> dict[str, list[str]]:
    """Every name of a parameter or buffer, with all the names of the same tensor."""
    names: dict[int, list[str]] = {}
    for found in (tree.named_parameters(model, remove_duplicate=False), tree.named_buffers(model, remove_duplicate=False)):
        for name, tensor in found:
            names.setdefault(id(tensor), []).append(name)
    return {name: same for same in names.values() for name in same}


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
