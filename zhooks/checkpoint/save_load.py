"""Save and resume of sharded runs: every rank writes its own file, one rename commits them all, and every rank reads back.

Each step that can fail on one rank fails on all, so no rank is left waiting; before a load has been found possible everywhere,
nothing is changed anywhere.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload.deepspeed import find as find_deepspeed
from offload.deepspeed import is_deepspeed
from offload.deepspeed import read as read_deepspeed
from offload.errors import CheckpointError, ZhooksError
from offload.shards import (
    Draft,
    Record,
    SavedModel,
    Series,
    ShardWriter,
    destination,
    find,
    read_manifest,
    refuse_occupied,
    shard_name,
)
from offload.store import Store
from offload.text import shown_path
from zhooks.checkpoint.background import Commit, Saving, Snapshot, SnapshotMemory, Writing, write_file
from zhooks.checkpoint.deepspeed_folder import deepspeed_folder
from zhooks.checkpoint.loading import Loading, check_stages
from zhooks.checkpoint.saved_folder import Place, Present, SavedFolder
from zhooks.checkpoint.shard import RunState, about_run, contents, whole_digests
from zhooks.checkpoint.state_tree import Unpacker
from zhooks.comm import Comm, ControlPlane

T = TypeVar("T")
#: So often a checkpoint that is replaced while it is read is looked for again.
_TRIES = 8


@torch.no_grad()
def save(
    run: RunState,
    folder: str | os.PathLike[str],
    extra: Mapping[str, Any],
    series: Series,
    store: Store | None,
    background: tuple[SnapshotMemory, float] | None = None,
) -> Saving:
    """See ``Attachment.save``.  Collective.

    Args:
        store: keeps what is not in memory of its own.
        background: for a save that is written by a thread while training goes on: memory for a snapshot, and how many seconds
            a rank may write nothing before the others give it up.
    """
    ranks = ControlPlane(run.comm.stage, "save", shown_path(folder))

    def writable() -> Path:
        target = destination(folder, "save")
        refuse_occupied(target, "save")
        series.check(target)
        return target

    target = ranks.run(writable)
    one_stage_a_path(run.comm, "save", ranks.on_first(lambda: str(target)))
    draft = Draft(target, ranks.on_first(lambda: secrets.token_hex(8)))
    event, nbytes = "save" if background is None else "snapshot", 0
    held: list[Snapshot] = []
    begun: list[Writing] = []

    def write() -> Record:
        with draft.files() as files, closing(Snapshot(contents(run, extra, digests), store, None)) as now:
            writer = ShardWriter(draft.path(shard_name(ranks.rank)), [each.entry for each in now.tensors], files.fd)
            return write_file(writer, now.tensors, run.bus)

    run.bus.begin(event, target.name)
    try:
        ranks.on_first(draft.open)
        digests = ranks.on_first(lambda: whole_digests(run))
        commit = Commit(draft, about_run(run), series, run.bus)
        if background is None:
            record = ranks.run(write)
            nbytes = record.nbytes
            raws = ranks.texts(record.model_dump_json(), first_only=True)
            ranks.on_first(lambda: commit([Record.model_validate_json(raw) for raw in raws]))
            draft.close()
            return Saving(target, ranks, None, draft.opened_ns, nbytes)
        memory, patience_s = background
        ranks.run(lambda: held.append(Snapshot(contents(run, extra, digests), store, memory)))
        nbytes = held[0].copied_nbytes
        ranks.run(lambda: begun.append(Writing(ranks, commit, held[0], patience_s)))
    except BaseException:
        for writing in begun:
            writing.cancel()
        for snapshot in held:
            snapshot.close()
        if ranks.first:
            draft.discard()
        draft.close()
        raise
    finally:
        run.bus.end(event, target.name, nbytes)
    begun[0].go()
    return Saving(target, ranks, begun[0], draft.opened_ns)


def one_stage_a_path(comm: Comm, verb: str, path: str) -> None:
    """Stages of a pipeline that save at once must not save to one path: the last would win.  Collective over pp.

    Raises:
        CheckpointError: two do; on the ranks of every stage.
    """
    stages = ControlPlane(comm.pp, verb)
    if len(set(stages.texts(path))) < stages.size:
        each, number = ("pipeline stages", "stage number") if comm.pipelined else ("ep ranks", "ep rank")
        raise CheckpointError(
            f"Cannot {verb} {path}. Expected a separate path for each of the {stages.size} {each}, found two that save to the "
            f"same one. Put the {number} into the path."
        )


def load(
    run: RunState, saved: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], present: Present | None = None
) -> dict[str, Any]:
    """See ``Attachment.load``; ``present``: what of the files was brought to the folder, where they are not whole."""
    given: list[Any] = list(saved) if isinstance(saved, (list, tuple)) else [saved]
    ranks = ControlPlane(run.comm.stage, "load", shown_path(given[0]) if given else "[]")
    stages = ControlPlane(run.comm.pp, "load", "all stages")

    def destinations() -> list[Path]:
        if not given:
            raise CheckpointError("load expected a folder, or the folders of all stages, found none. Pass one.")
        return [destination(one, "load") for one in given]

    targets = _on_stages(stages, lambda: ranks.run(destinations))
    nbytes = 0
    run.bus.begin("load", targets[0].name)
    try:
        with ExitStack() as files:
            loading, follow = _found(run, ranks, stages, targets, files, present)
            nbytes = loading.nbytes
            check_stages(run.comm, loading)
            with ExitStack() as undo:
                # Refused on some rank: on all, objects have what they had.
                _on_stages(stages, lambda: ranks.run(lambda: loading.hand_over(undo)))
                undo.pop_all()
            _on_stages(stages, lambda: ranks.run(lambda: _apply(loading, targets[0])))
            follow()
        return loading.extra
    finally:
        run.bus.end("load", targets[0].name, nbytes)


def _found(
    run: RunState, ranks: ControlPlane, stages: ControlPlane, targets: Sequence[Path], files: ExitStack, present: Present | None
) -> tuple[Loading, Callable[[], None]]:
    """What is to be loaded; looked for again where another process has put a newer checkpoint in its place.  Collective."""
    tokens: list[str] = []
    for left in reversed(range(_TRIES)):
        tokens.clear()
        try:
            return _on_stages(stages, lambda: _checked(run, ranks, targets, tokens, files, present))
        except CheckpointError as error:
            # What had been opened is of a checkpoint that is gone: nobody can tell that from damage by the files alone.
            now: list[str] = []
            with suppress(CheckpointError, OSError):
                now.extend(read_manifest(find(target)).token for target in targets if not is_deepspeed(target))
            replaced = ranks.failed(error if now != tokens else None) is not None
            if stages.failed(error if replaced else None) is None or not left:
                raise
            files.close()
    raise AssertionError("the last try returns or raises")


def _on_stages(stages: ControlPlane, step: Callable[[], T]) -> T:
    """Take a step that fails on all ranks of a model or on none; and on those of all stages of a pipeline.  Collective."""
    results, problem = [], None
    try:
        results.append(step())
    except CheckpointError as error:
        problem = error
    failure = stages.failed(problem) if stages.size > 1 else None
    if problem is not None:
        raise problem
    if failure is not None:
        raise CheckpointError(f"stage {failure[0]}: {failure[2]}")
    return results[0]


def _checked(
    run: RunState, ranks: ControlPlane, targets: Sequence[Path], read: list[str], files: ExitStack, present: Present | None
) -> tuple[Loading, Callable[[], None]]:
    """Everything that can be wrong with the folders; ``read`` gets the tokens of those of ours.  Collective."""

    def suffix(target: Path, foreign: bool) -> str:
        """What is added to the path that was given: by a save that was killed, or the folder that DeepSpeed's latest names."""
        if foreign:
            inner = find_deepspeed(target)
            return "" if inner == target else f"/{inner.name}"
        return find(target).name.removeprefix(target.name)

    foreign = ranks.on_first(lambda: list(map(is_deepspeed, targets)))
    suffixes = ranks.on_first(lambda: list(map(suffix, targets, foreign)))
    paths = [Path(f"{target}{suffix}") for target, suffix in zip(targets, suffixes, strict=True)]
    place = Place.of(run.comm)

    def opened() -> list[SavedFolder]:
        found: list[SavedFolder] = []
        for path, other in zip(paths, foreign, strict=True):
            if other:
                found.append(deepspeed_folder(read_deepspeed(path), run, place))
                continue
            manifest = read_manifest(path)
            read.append(manifest.token)
            found.append(SavedFolder(path, manifest, place, present=present))
        return found

    folders = [files.enter_context(closing(one)) for one in ranks.run(_damaged_or(paths[0], opened))]
    tokens = ranks.on_first(lambda: [one.manifest.token for one in folders])

    def loading() -> Loading:
        for one, token in zip(folders, tokens, strict=True):
            if one.manifest.token != token:
                raise CheckpointError(
                    f"Cannot load {one.path}. Expected the same checkpoint on all ranks, found a different one than on the "
                    "first rank. Load from a file system that all hosts share."
                )
        return Loading(run, folders)

    found = ranks.run(_damaged_or(paths[0], loading))
    return found, ranks.run(lambda: run.scaling.checked(folders[0].manifest.about))


def _apply(loading: Loading, target: Path) -> None:
    try:
        loading.apply()
    except Exception as error:
        found = str(error) if isinstance(error, ZhooksError) else f"{type(error).__name__}: {error}."
        raise CheckpointError(
            f"Cannot load {target}. Expected to finish loading what was verified, found: {found} The run is partly loaded now: "
            "correct that and load again."
        ) from error


def _damaged_or(folder: Path, step: Callable[[], T]) -> Callable[[], T]:
    """A file with right checksums that still is none of ours."""

    def checked() -> T:
        try:
            return step()
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"Cannot load {folder}. Expected contents that attachment.save() wrote, found {type(error).__name__}: {error}. "
                "Load another checkpoint."
            ) from error

    return checked


def saved_extra(folder: str | os.PathLike[str], key: str) -> tuple[int, Any]:
    """Without loading anything: the number of ranks that saved, and the plain data at ``key`` of ``extra``; None where there is
    none.

    Raises:
        CheckpointError: there is no checkpoint, or none that ``save`` wrote.
    """
    saved = SavedModel(find(destination(folder, "load")))

    def refuse(name: str) -> Tensor:
        raise CheckpointError(
            f"Cannot load {saved.path}. Expected plain data at {key}, found a tensor ({name}). It is damaged."
        )

    packed = saved.document().get("extra")
    rows = packed.get("dict") if isinstance(packed, dict) else None
    found = [row[1] for row in rows if row[0] == key] if isinstance(rows, list) else []
    return saved.manifest.world, Unpacker(refuse, torch.device("cpu")).unpack(found[0]) if found else None
