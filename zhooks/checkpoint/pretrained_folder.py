"""``save_pretrained`` of an attached model: the folder that transformers and PEFT read, and how it is committed.

Names, tied weights, conversions and configurations are transformers' own and PEFT's, which whoever has such a model has
imported; what has another format is refused.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import shutil
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CapabilityError, CheckpointError, PolicyError
from offload.events import Bus
from offload.shards import Draft, Entry, ExportKind, destination, refuse_occupied
from offload.text import parse_size, shown, shown_path
from zhooks import tree
from zhooks.checkpoint.whole_folder import Recipe, WrittenTo, tensors_of, write_files
from zhooks.checkpoint.whole_values import check_alike
from zhooks.comm import Comm, ControlPlane
from zhooks.compiled import plain_name, uncompiled
from zhooks.layout import Ignored
from zhooks.tensor import ShardedTensor, range_alone
from zhooks.unit import Unit

_VERB = "save_pretrained"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
_WEIGHTS = r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
#: Where tokenizers keep more than one chat template.
_TEMPLATES = "additional_chat_templates"

Gathered = Callable[[Sequence[Tensor]], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Pretrained:
    """What is asked for: see ``Attachment.save_pretrained``."""

    folder: str | os.PathLike[str]
    tokenizer: Any
    max_shard_size: int | str
    dtype: torch.dtype | str | None

    def most_nbytes(self) -> int:
        """Of one file."""
        try:
            nbytes = parse_size(self.max_shard_size)
        except PolicyError as error:
            raise CheckpointError(f"{_VERB}: max_shard_size: {error}. Pass 5GB or the like.") from None
        if nbytes < 1:
            raise CheckpointError(f"{_VERB} expected max_shard_size of at least a byte, found {nbytes}. Pass 5GB or the like.")
        return nbytes

    def asked_dtype(self) -> torch.dtype | None:
        """Of the parameters; None leaves each as it is."""
        found = _DTYPES.get(self.dtype) if isinstance(self.dtype, str) else self.dtype
        if self.dtype is not None and found not in _DTYPES.values():
            names = ", ".join(f'"{name}"' for name in _DTYPES)
            raise CheckpointError(f"{_VERB} expected dtype {names} or None, found {shown(self.dtype)}. Pass one of these.")
        return found


def save_pretrained(
    model: nn.Module, units: Sequence[Unit], comm: Comm, bus: Bus, ignored: Ignored, asked: Pretrained, gathered: Gathered
) -> None:
    """See ``Attachment.save_pretrained``.

    Args:
        gathered: whole values of these parameters at their modules, on every rank, inside.
    """
    ranks = ControlPlane(comm.stage, _VERB, shown_path(asked.folder))
    target = ranks.run(lambda: destination(asked.folder, _VERB))
    bare = uncompiled(model)

    def read() -> tuple[ExportKind, str]:
        refuse_occupied(target, _VERB)
        if comm.pp.axis.world > 1:
            what = "a stage of a pipeline" if comm.pipelined else "ranks of an ep axis"
            raise CheckpointError(
                f"{_VERB} expected ranks that together hold the whole model, found {what}. Use attachment.save_full(file) on "
                "each, or load its checkpoint on a mesh without that axis."
            )
        if asked.tokenizer is not None and not callable(getattr(asked.tokenizer, _VERB, None)):
            raise CheckpointError(
                f"{_VERB} expected a tokenizer or processor with {_VERB}, found {shown(asked.tokenizer)}. Pass one, or None."
            )
        return _kind(bare, ignored, asked), f"{asked.most_nbytes()} {asked.asked_dtype()}"

    def tokenizer() -> None:
        if asked.tokenizer is not None:
            asked.tokenizer.save_pretrained(str(draft.made.path))

    kind, said = ranks.run(read)
    if not ranks.agree(said):
        raise CheckpointError(
            f"{_VERB} expected one max_shard_size and dtype on all ranks, found different ones. Pass the same."
        )
    check_alike(model, ignored, comm, _VERB)
    draft = Draft(target, ranks.on_first(lambda: secrets.token_hex(8)), kind)
    bus.begin("export", target.name)
    nbytes = 0
    try:
        ranks.on_first(draft.open)
        if kind.mark == "config.json":
            sizes = _write_model(bare, units, comm, bus, asked, draft, ranks)
        else:
            sizes = _write_adapters(bare, draft, ranks, gathered)
        # On all ranks: those that it is not read from may have been given none.
        ranks.on_first(tokenizer)
        nbytes = sum(sizes.values())
        ranks.on_first(lambda: draft.commit(sizes))
    except BaseException:
        if ranks.first:
            draft.discard()
        raise
    finally:
        draft.close()
        bus.end("export", target.name, nbytes)


def _kind(model: Any, ignored: Ignored, asked: Pretrained) -> ExportKind:
    """Which folder is meant.

    Raises:
        CheckpointError: none of transformers or PEFT, or none that a plain process could load.
    """
    peft, transformers = sys.modules.get("peft"), sys.modules.get("transformers")
    if peft is not None and isinstance(model, peft.PeftModel):
        if asked.dtype is not None:
            raise CheckpointError(
                f"{_VERB} expected no dtype for adapters, which are written in the dtype they are trained in, found "
                f"{shown(asked.dtype)}. Drop it."
            )
        first = "default" if "default" in model.peft_config else next(iter(model.peft_config))
        mark = _ADAPTER if first == "default" else f"{first}/{_ADAPTER}"
        never = {"config.json", "model.safetensors", _INDEX}
        return ExportKind(mark, _WEIGHTS, never, {*model.peft_config, _TEMPLATES})
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise CheckpointError(
            f"{_VERB} expected a model of transformers or PEFT, found {type(model).__name__}. Use attachment.save_full(file)."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"{_VERB} expected adapters made by peft.get_peft_model, found {type(model).__name__} with those of add_adapter. "
            "Use get_peft_model before attach, or call detach() first."
        )
    if ignored.frozen or getattr(model, "hf_quantizer", None) is not None:
        found = next(iter(ignored.frozen), type(model).__name__)
        raise CheckpointError(
            f"{_VERB} expected plain parameters, found {found}, which is quantised: only its library can write its values. "
            "Train PEFT adapters on it and save those, or use attachment.save()."
        )
    return ExportKind("config.json", _WEIGHTS, {_ADAPTER}, {_TEMPLATES})


# A model of transformers.


def _write_model(
    model: Any, units: Sequence[Unit], comm: Comm, bus: Bus, asked: Pretrained, draft: Draft, ranks: ControlPlane
) -> dict[str, int]:
    """Weights, index and configuration; sizes of the files on the first rank.  Collective."""
    recipes = ranks.run(lambda: _recipes_of(model, asked.asked_dtype()))
    files, index = ranks.run(lambda: _divided(recipes, asked.most_nbytes(), model))

    def beside() -> None:
        folder = str(draft.made.path)
        # The model's own stays as it is.
        config = copy.deepcopy(model.config)
        config.dtype = str(asked.asked_dtype() or model.dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        if model.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, folder, config=config)
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if index is not None:
            (draft.made.path / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    # First, for it may be refused: a generation_config that is invalid is no reason to write the weights in vain.
    ranks.on_first(beside)
    return write_files(tensors_of(model, _VERB), units, comm, bus, recipes, files, WrittenTo(_VERB, draft.target, draft.files))


# Which tensors transformers would write: shapes on meta, and conversions to be made of the values later.


def _recipes_of(model: Any, dtype: torch.dtype | None) -> list[Recipe]:
    """What transformers would write of this model, in its order; no value is looked at."""
    held = tensors_of(model, _VERB)
    for name in model._keys_to_ignore_on_save or ():
        held.pop(name, None)
    # What transformers itself would keep in fp32 is not converted.
    words = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    words |= set(model._keep_in_fp32_modules or ()) if dtype is torch.float16 else set()
    narrow = {
        name
        for name, tensor in held.items()
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.element_size() > 1
        if words.isdisjoint(name.split("."))
    }
    kept = _names_written(model, held)
    meta = {name: torch.empty(held[name].shape, dtype=held[name].dtype, device="meta") for name in kept}
    recipes: list[Recipe] = []
    for sources, key, convert in _conversions(model, kept):
        made = {key: meta[sources[0]]} if convert is None else convert({source: meta[source] for source in sources})
        chosen = dtype if dtype is not None and narrow.issuperset(sources) else None
        entries = tuple(Entry(name, chosen or like.dtype, tuple(like.shape)) for name, like in made.items())
        recipes.append(Recipe(tuple(sources), entries, convert))
    return recipes


def _names_written(model: Any, held: Mapping[str, Tensor]) -> list[str]:
    """The names without those of tied weights that transformers does not write."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    # It asks the model for what is on meta, by the names that the model itself has.
    own = {plain_name(name): name for name in model.state_dict(keep_vars=True)}
    plain = {own[name]: name for name in held}
    meta = {own[name]: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in held.items()}
    return [plain[name] for name in remove_tied_weights_from_state_dict(meta, model)]


Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def _conversions(model: Any, names: Sequence[str]) -> Iterator[tuple[list[str], str, Convert | None]]:
    """Which tensors become which: names in the model, the name in the folder, and a conversion, None where there is none.

    As ``transformers.core_model_loading.revert_weight_conversion`` has it.  That takes the whole state at once, for a
    conversion may need several tensors; here each conversion waits for its own.
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
        yield from (([name], name, None) for name in names)
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
            yield [sources[0][0]], key, None
        else:
            renamed = partial(rename, weight_renamings=renamings)
            yield [name for name, _ in sources], key, partial(_converted, model, converter, key, sources, renamed)


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


def _divided(recipes: Sequence[Recipe], most: int, model: Any) -> tuple[dict[str, list[Entry]], dict[str, Any] | None]:
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


# Adapters of PEFT.


def _write_adapters(model: Any, draft: Draft, ranks: ControlPlane, gathered: Gathered) -> dict[str, int]:
    """Adapters alone, by PEFT's own ``save_pretrained``, with their values whole.  Collective."""
    needed = ranks.run(lambda: _adapter_tensors(model))
    with gathered(needed) if needed else nullcontext(), torch.no_grad():

        def write() -> None:
            with draft.files() as folder:
                if ranks.first and (draft.target / "README.md").is_file():
                    # PEFT adds to the card that is there.
                    with suppress(OSError):
                        shutil.copyfile(draft.target / "README.md", folder.path / "README.md")
                model.save_pretrained(str(folder.path), is_main_process=ranks.first)

        ranks.run(write)
    return {}


def _adapter_tensors(model: Any) -> list[Tensor]:
    """The parameters that PEFT writes: trainable ones, other adapters, and embeddings where it adds these.

    Not those of virtual tokens, whose encoder PEFT calls: it is gathered as in any forward.
    """
    from peft import get_peft_model_state_dict

    needed = {id(param): param for param in tree.parameters(model) if param.requires_grad}
    for name, config in model.peft_config.items():
        if not config.is_prompt_learning:
            with warnings.catch_warnings():
                # What it has to say it says when it writes.
                warnings.simplefilter("ignore")
                picked = get_peft_model_state_dict(model, state_dict=model.state_dict(keep_vars=True), adapter_name=name)
            needed |= {id(each): each for each in picked.values() if isinstance(each, nn.Parameter)}
    called = {id(param) for param in tree.parameters(getattr(model, "prompt_encoder", nn.Module()))}
    return [param for key, param in needed.items() if key not in called]


# The model's own.


class StockFolders:
    """Stands before ``save_pretrained`` of every model of transformers in an attached one: refuses before a file is there.

    transformers writes configurations first, and only then meets, in the weights, what refuses to be written: what it left
    looked like a checkpoint.  Whole values that it is handed, or that are there inside ``gathered``, it writes as ever.
    """

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
