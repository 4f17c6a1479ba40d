"""``save_pretrained`` of an attached model: the folder that transformers and PEFT read, and how it is committed.

``attach.py`` calls it for ``Attachment.save_pretrained``, and ``session/open.py`` opens `StockFolders` for the model's own.
Names, tied weights, conversions and configurations are
transformers' own and PEFT's, which whoever has such a model has imported; what has another format is refused.  It never
changes the model or its configuration.
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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError, PolicyError
from offload.events import Bus
from offload.shards import Draft, ExportKind, destination, refuse_occupied
from offload.text import parse_size, shown, shown_path
from zhooks import tree
from zhooks.checkpoint.ignored_values import check_alike
from zhooks.checkpoint.transformers_tensors import divided, recipes_of
from zhooks.checkpoint.whole_folder import WrittenTo, tensors_of, write_files
from zhooks.comm import Comm, ControlPlane
from zhooks.compiled import uncompiled
from zhooks.layout import Ignored
from zhooks.tensor import ShardedTensor, range_alone
from zhooks.unit import Unit

__all__ = ["Pretrained", "StockFolders", "save_pretrained"]

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
        _check_mesh(comm)
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
        found = "found different ones. Pass the same"
        raise CheckpointError(f"{_VERB} expected one max_shard_size and dtype on all ranks, {found}.")
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


def _check_mesh(comm: Comm) -> None:
    if comm.pp.axis.world > 1:
        what = "a stage of a pipeline" if comm.pipelined else "ranks of an ep axis"
        raise CheckpointError(
            f"{_VERB} expected ranks that together hold the whole model, found {what}. Use attachment.save_full(file) on "
            "each, or load its checkpoint on a mesh without that axis."
        )


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
    recipes = ranks.run(lambda: recipes_of(model, asked.asked_dtype()))
    files, index = ranks.run(lambda: divided(recipes, asked.most_nbytes(), model))

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
