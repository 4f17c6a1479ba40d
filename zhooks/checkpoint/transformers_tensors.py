"""Which tensors transformers would write of a model: names, tied weights, conversions, dtypes, and their division into files.

``pretrained_folder.py`` calls it.  It looks at no value: tensors of the model are shapes on meta here, and conversions are
handed on to be made of the values later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CapabilityError
from offload.shards import Entry
from zhooks import tree
from zhooks.checkpoint.whole_folder import Recipe, tensors_of
from zhooks.compiled import plain_name

__all__ = ["divided", "recipes_of"]

_VERB = "save_pretrained"


def recipes_of(model: Any, dtype: torch.dtype | None) -> list[Recipe]:
    """What transformers would write of this model, in its order; no value is looked at."""
    held = tensors_of(model, _VERB)
    for name in model._keys_to_ignore_on_save or ():
        held.pop(name, None)
    narrow = _narrowed(model, held, dtype)
    kept = _once(model, held)
    meta = {name: torch.empty(held[name].shape, dtype=held[name].dtype, device="meta") for name in kept}
    recipes: list[Recipe] = []
    for sources, convert in _conversions(model, kept):
        likes = {source: meta[source] for source in sources}
        made = likes if convert is None else convert(likes)
        chosen = dtype if dtype is not None and narrow.issuperset(sources) else None
        entries = tuple(Entry(name, chosen or like.dtype, tuple(like.shape)) for name, like in made.items())
        recipes.append(Recipe(tuple(sources), entries, None if isinstance(convert, _Renamed) else convert))
    return recipes


def _narrowed(model: Any, held: Mapping[str, Tensor], dtype: torch.dtype | None) -> set[str]:
    """The names of parameters that are converted: all but those that transformers itself would keep in fp32."""
    words = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    words |= set(model._keep_in_fp32_modules or ()) if dtype is torch.float16 else set()
    return {
        name
        for name, tensor in held.items()
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.element_size() > 1
        if words.isdisjoint(name.split("."))
    }


def _once(model: Any, held: Mapping[str, Tensor]) -> list[str]:
    """The names without those of tied weights that transformers does not write."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    # It asks the model for what is on meta, by the names that the model itself has.
    own = {plain_name(name): name for name in model.state_dict(keep_vars=True)}
    plain = {own[name]: name for name in held}
    meta = {own[name]: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held.items()}
    return [plain[name] for name in remove_tied_weights_from_state_dict(meta, model)]


class _Renamed:
    """A tensor that is written as it is, under another name."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name

    def __call__(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._name: values[self._source]}


Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def _conversions(model: Any, names: Sequence[str]) -> Iterator[tuple[list[str], Convert | None]]:
    """Which tensors become which, as ``transformers.core_model_loading.revert_weight_conversion`` has it, one at a time.

    That takes the whole state at once, for a conversion may need several tensors; here each conversion waits for its own.
    """
    conversions = getattr(model, "_weight_conversions", None)
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        tools = loading.apply_converters, loading.apply_renamings, loading.PrefixChange, loading.dot_natural_key
    except (ImportError, AttributeError) as error:
        raise CapabilityError(
            f"{_VERB} expected transformers 5.23, whose weight conversions are known, found another ({error}). Install that, "
            "or use attachment.save_full(file)."
        ) from None
    convert_key, rename, prefix_change, natural = tools
    if conversions is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [one for one in mapping if not isinstance(one, prefix_change)]
    if not conversions:
        yield from (([name], None) for name in names)
        return
    back = [one.reverse_transform() for one in conversions[::-1]]
    renamings = [one for one in back if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in back if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, tuple[list[tuple[str, str]], Any]] = {}
    for name in sorted(names, key=natural):
        key, pattern = convert_key(name, converters)
        if pattern is None:
            found[rename(name, renamings)] = ([(name, "")], None)
        else:
            found.setdefault(key, ([], by_pattern[pattern]))[0].append((name, pattern))
    for key, (sources, converter) in found.items():
        if converter is None:
            yield [sources[0][0]], _Renamed(sources[0][0], key)
        else:
            renamed = partial(rename, weight_renamings=renamings)
            yield [name for name, _ in sources], partial(_converted, model, converter, key, sources, renamed)


def _converted(
    model: Any,
    converter: Any,
    key: str,
    sources: Sequence[tuple[str, str]],
    rename: Callable[[str], str],
    values: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    mine = copy.deepcopy(converter)
    for name, pattern in sources:
        mine.add_tensor(key, name, pattern, values[name])
    made = mine.convert(key, model=model, config=model.config)
    return {rename(name): value[0] if isinstance(value, list) else value for name, value in made.items()}


def divided(recipes: Sequence[Recipe], most: int, model: Any) -> tuple[dict[str, list[Entry]], dict[str, Any] | None]:
    """The files as transformers divides them, and the index; None where there is one file."""
    from huggingface_hub import split_torch_state_dict_into_shards

    entries = {entry.name: entry for recipe in recipes for entry in recipe.made}
    meta = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in entries.items()}
    split = split_torch_state_dict_into_shards(meta, filename_pattern="model{suffix}.safetensors", max_shard_size=most)
    files = {file: [entries[name] for name in names] for file, names in split.filename_to_tensors.items()}
    if not split.is_sharded:
        return files, None
    parameters = sum(param.numel() for param in tree.parameters(model))
    metadata = {"total_parameters": parameters, **split.metadata}
    return files, {"metadata": metadata, "weight_map": split.tensor_to_filename}
