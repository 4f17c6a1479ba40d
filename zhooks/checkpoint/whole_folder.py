"""Whole tensors of an attached model into safetensors files, one flat buffer at a time; each file is one rank's to write.

Every rank takes part in every gather and keeps what belongs to its own files; no rank ever has more than one flat buffer, or
what one conversion needs.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError, ZhooksError
from offload.events import Bus
from offload.shards import Entry, Folder, WholeFile, destination
from offload.text import shown_path
from zhooks.checkpoint.save_load import one_stage_a_path
from zhooks.checkpoint.whole_values import check_alike, is_first, whole_values
from zhooks.comm import CONTROL, Call, Comm, ControlPlane
from zhooks.compiled import plain_name
from zhooks.layout import Ignored, flats_of, whole_of
from zhooks.unit import Flat, Unit, passing

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors of the folder are made of tensors of the model.

    Attributes:
        sources: names in the model.
        made: what is written, under the names that the folder has.
        convert: from the sources' values to those of ``made``, by name; None where the one source is the one that is made.
    """

    sources: tuple[str, ...]
    made: tuple[Entry, ...]
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class WrittenTo:
    """Where files go.

    Attributes:
        verb: who asked for them, for errors.
        target: what they are or will be in, for events and errors.
        folder: the folder as this rank finds it.
    """

    verb: str
    target: Path
    folder: Callable[[], AbstractContextManager[Folder]]


def tensors_of(model: nn.Module, verb: str) -> dict[str, Tensor]:
    """The model's state by the names of one that nothing has compiled; what is shared is there under each of its names.

    Raises:
        CheckpointError: something in it is no tensor.
    """
    held = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, value in held.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{verb} expected tensors in the model's state, found {type(value).__name__} at {name}, which safetensors "
                "cannot hold. Use attachment.save(), or remove it."
            )
    return held


@torch.no_grad()
def write_files(
    held: Mapping[str, Tensor],
    units: Sequence[Unit],
    comm: Comm,
    bus: Bus,
    recipes: Sequence[Recipe],
    files: Mapping[str, Sequence[Entry]],
    to: WrittenTo,
) -> dict[str, int]:
    """Write ``files`` into the folder, durable; returns their sizes on the first rank.  Collective.

    Args:
        held: the model's state by name, parameters as they are.
    Raises:
        CheckpointError: on every rank, naming the first that failed.
    """
    ranks = ControlPlane(comm.stage, to.verb, str(to.target))
    mine = {name: entries for number, (name, entries) in enumerate(files.items()) if number % ranks.size == ranks.rank}
    with ExitStack() as stack:

        def begin() -> _Sink:
            return _Sink(to.verb, stack.enter_context(to.folder()).path, mine, recipes, stack)

        sink = ranks.run(begin)
        done = 0
        names: dict[int, list[str]] = {}
        for name, tensor in held.items():
            names.setdefault(id(tensor), []).append(name)
        sharded: set[int] = set()
        for flat in flats_of(units):
            sharded.update(id(param) for param in flat.params)
            _write_flat(flat, sink, names)
            if sink.written > done:
                done = sink.written
                bus.counter("exported", to.target.name, done)
        for identity, (name, *_) in list(names.items()):
            if identity not in sharded:
                # Of buffers, which ranks may have different ones of, the first rank's count.
                plain = whole_of(held[name]).detach().resolve_conj().resolve_neg()
                whole = plain.clone(memory_format=torch.contiguous_format)
                comm.stage.broadcast(Call(CONTROL, to.verb, name), whole)
                for each in names[identity]:
                    sink.put(each, 0, whole)
        sizes = ranks.run(sink.finish)
        raws = ranks.texts(json.dumps(sizes), first_only=True)
    return {name: nbytes for raw in raws for name, nbytes in json.loads(raw).items()} if is_first(comm) else {}


def _write_flat(flat: Flat, sink: _Sink, names: Mapping[int, Sequence[str]]) -> None:
    of, spec = [names.get(id(param), ()) for param in flat.params], flat.specs[0]
    if flat.long and spec.place is None and not any(map(sink.converts, of[0])):
        like = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
        if like.is_contiguous():
            # The buffer holds all of the parameter, in the order that a file has it.
            for start, values in passing(flat, flat.shard):
                known = values[: max(0, flat.layout.numels[0] - start)]
                for name in of[0] if known.numel() else ():
                    sink.put(name, start, known)
            return
    wanted = [index for index, each in enumerate(of) if any(map(sink.wants, each))]
    for each, value in zip(of, whole_values(flat, flat.shard, wanted, _CPU), strict=True):
        if value is not None:
            for name in each:
                sink.put(name, 0, value)


class _Sink:
    """The files of this rank.  The first failure is kept: this rank goes on with the others' gathers, and raises then."""

    def __init__(
        self, verb: str, folder: Path, mine: Mapping[str, Sequence[Entry]], recipes: Sequence[Recipe], stack: ExitStack
    ) -> None:
        self._verb = verb
        self._files: list[WholeFile] = []
        self._of: dict[str, tuple[WholeFile, Entry]] = {}
        for name, entries in mine.items():
            file = WholeFile(folder, name, entries)
            stack.callback(file.close)
            self._files.append(file)
            self._of.update((entry.name, (file, entry)) for entry in entries)
        self._recipes: dict[str, list[Recipe]] = {}
        for recipe in recipes:
            if any(entry.name in self._of for entry in recipe.made):
                for source in recipe.sources:
                    self._recipes.setdefault(source, []).append(recipe)
        #: What waits for the other sources of its conversion.
        self._held: dict[str, Tensor] = {}
        self._problem: Exception | None = None
        self.written = 0

    def wants(self, name: str) -> bool:
        return self._problem is None and name in self._recipes

    def converts(self, name: str) -> bool:
        """It is needed whole; asked of all ranks alike, whose files may differ."""
        return any(recipe.convert is not None for recipe in self._recipes.get(name, ()))

    def put(self, name: str, start: int, values: Tensor) -> None:
        """Elements of a tensor of the model, from ``start`` on; all of them where it is converted."""
        if not self.wants(name):
            return
        try:
            for recipe in self._recipes[name]:
                if recipe.convert is None:
                    self._write(recipe.made[0].name, start, values)
                    continue
                self._held[name] = values
                if self._held.keys() >= set(recipe.sources):
                    made = recipe.convert({source: self._held.pop(source) for source in recipe.sources})
                    for key, value in made.items():
                        self._write(key, 0, value)
        except Exception as error:
            self._problem = error
            self._held.clear()

    def _write(self, name: str, start: int, values: Tensor) -> None:
        if name not in self._of:
            return
        file, entry = self._of[name]
        made = values.to(entry.dtype)
        if made is not values and bool((made.isinf() & values.isfinite()).any()):
            raise CheckpointError(
                f"save_pretrained expected values of {name} that {entry.dtype} can hold, found larger ones, which would become "
                "infinite. Choose another dtype."
            )
        file.write(name, start, made)
        self.written += made.nbytes

    def finish(self) -> dict[str, int]:
        """Everything is on the disk; the sizes of the files."""
        if isinstance(self._problem, (ZhooksError, OSError)):
            raise self._problem
        if self._problem is not None:
            found = f"{type(self._problem).__name__}: {self._problem}"
            raise CheckpointError(
                f"{self._verb} expected to convert and write the model's tensors, found {found}. Use attachment.save()."
            ) from self._problem
        for file in self._files:
            file.finish()
        return {file.name: file.nbytes for file in self._files}


# One file.


@torch.no_grad()
def save_full(
    model: nn.Module, units: Sequence[Unit], comm: Comm, bus: Bus, target: str | os.PathLike[str], ignored: Ignored
) -> None:
    """See ``Attachment.save_full``.  Tied parameters are written under each name: a strict load succeeds."""
    ranks = ControlPlane(comm.stage, "save_full", shown_path(target))
    path = ranks.run(lambda: destination(target, "save_full", "file"))

    def check_plain() -> None:
        for name, one in ignored.frozen.items():
            raise CheckpointError(
                f"save_full expected plain parameters, found {len(ignored.frozen)} frozen of tensor subclasses ({name} is a "
                f"{one.kind}), which safetensors cannot hold. Use save(), or state_dict(), which leaves them out and says so, "
                "or save only the adapters."
            )

    ranks.run(check_plain)
    ranks.on_first(lambda: _check_replaceable(path, Path(target)))
    check_alike(model, ignored, comm, "save_full")
    state = model.state_dict(keep_vars=True)
    held = {plain_name(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held.items()]
    one_stage_a_path(comm, "save_full", str(path))
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        into = WrittenTo("save_full", path, lambda: Folder(path.parent))
        write_files(held, units, comm, bus, [Recipe((entry.name,), (entry,)) for entry in entries], {made.name: entries}, into)
        ranks.on_first(lambda: os.replace(made, path))
    except BaseException:
        with suppress(OSError):
            if ranks.first:
                made.unlink(missing_ok=True)
        raise


def _check_replaceable(path: Path, given: Path) -> None:
    """There is a folder to write into, and what is at the path may make room for a file."""
    if not path.parent.is_dir():
        raise CheckpointError(
            f"Cannot write {shown_path(given)}. Expected a folder to write into, found none at {shown_path(given.parent)}. "
            "Make it, or choose another path."
        )
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            found = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
            raise CheckpointError(
                f"Cannot write {shown_path(given)}. Expected a file or no such path, found {found}. Choose another path."
            )
