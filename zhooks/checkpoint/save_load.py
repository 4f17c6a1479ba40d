"""Save and resume of sharded runs: every rank writes its own file, one rename commits them all, and every rank reads back.

``session/state.py`` calls ``save``, ``save_beside`` and ``load`` for the Attachment's methods.  Each step that can fail on
one rank fails on all, so no rank is left waiting; before a load has been found possible everywhere, nothing is changed
anywhere.  It never gathers a parameter and never decides on which tier values are.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from offload.deepspeed import find as find_deepspeed
from offload.deepspeed import is_deepspeed
from offload.deepspeed import read as read_deepspeed
from offload.errors import CheckpointError, ZhooksError
from offload.shards import (
    Draft,
    Record,
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
from zhooks.checkpoint.background import Commit, Saving, Writing, write_file
from zhooks.checkpoint.check_shard import check, check_stages
from zhooks.checkpoint.deepspeed_folder import deepspeed_folder
from zhooks.checkpoint.load_shard import Loading
from zhooks.checkpoint.saved_folder import Place, Present, SavedFolder
from zhooks.checkpoint.shard_contents import FileTensor, RunState, contents, describe, places, whole_digests
from zhooks.checkpoint.snapshot import PartsOnDisk, Snapshot, read_ahead
from zhooks.comm import Comm, ControlPlane

__all__ = ["about_run", "load", "one_stage_a_path", "save", "save_beside"]

Take = Callable[[Sequence[FileTensor]], Snapshot]

T = TypeVar("T")
#: So often a checkpoint that is replaced while it is read is looked for again.
_TRIES = 8


@torch.no_grad()
def save(
    run: RunState, folder: str | os.PathLike[str], extra: Mapping[str, Any], series: Series, store: Store | None
) -> Saving:
    """See ``Attachment.save``; ``store`` keeps what is not in memory of its own."""
    ranks, draft = _begin(run, folder, series)
    target = draft.target
    run.bus.begin("save", target.name)
    nbytes = 0
    try:
        ranks.on_first(draft.open)
        digests = ranks.on_first(lambda: whole_digests(run))
        record = ranks.run(lambda: _write(run, draft, extra, digests, store))
        nbytes = record.nbytes
        raws = ranks.texts(record.model_dump_json(), first_only=True)
        commit = Commit(draft, about_run(run), series, run.bus)
        ranks.on_first(lambda: commit([Record.model_validate_json(raw) for raw in raws]))
    except BaseException:
        if ranks.first:
            draft.discard()
        raise
    finally:
        draft.close()
        run.bus.end("save", target.name, nbytes)
    return Saving(target, ranks, None, draft.opened_ns, nbytes)


@torch.no_grad()
def save_beside(
    run: RunState, folder: str | os.PathLike[str], extra: Mapping[str, Any], series: Series, take: Take, patience_s: float
) -> Saving:
    """The same, written by a thread beside training: see ``Attachment.save``.

    Args:
        take: makes a snapshot of this rank's tensors.
        patience_s: how long a rank may write nothing before the others give it up.
    """
    ranks, draft = _begin(run, folder, series)
    held: list[Snapshot] = []
    begun: list[Writing] = []

    def snapshot() -> None:
        held.append(take(contents(run, extra, digests)))

    def begin() -> None:
        begun.append(Writing(ranks, Commit(draft, about, series, run.bus), held[0], patience_s))

    run.bus.begin("snapshot", draft.target.name)
    try:
        ranks.on_first(draft.open)
        digests = ranks.on_first(lambda: whole_digests(run))
        about = about_run(run)
        ranks.run(snapshot)
        ranks.run(begin)
    except BaseException:
        for writing in begun:
            writing.cancel()
        for each in held:
            each.close()
        if ranks.first:
            draft.discard()
        draft.close()
        raise
    finally:
        run.bus.end("snapshot", draft.target.name, sum(each.copied_nbytes for each in held))
    begun[0].go()
    return Saving(draft.target, ranks, begun[0], draft.opened_ns)


def _begin(run: RunState, folder: str | os.PathLike[str], series: Series) -> tuple[ControlPlane, Draft]:
    """Where every rank writes to, found possible."""
    ranks = ControlPlane(run.comm.stage, "save", shown_path(folder))

    def found() -> Path:
        target = destination(folder, "save")
        refuse_occupied(target, "save")
        series.check(target)
        return target

    target = ranks.run(found)
    one_stage_a_path(run.comm, "save", ranks.on_first(lambda: str(target)))
    return ranks, Draft(target, ranks.on_first(lambda: secrets.token_hex(8)))


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


def about_run(run: RunState) -> dict[str, Any]:
    """What a manifest says of the run."""
    layout = {"flats": describe(run), "places": places(run.comm)}
    return {**run.about, **run.scaling.saved(), **layout, "torch": torch.__version__}


def _write(
    run: RunState, draft: Draft, extra: Mapping[str, Any], digests: Mapping[str, str], store: Store | None
) -> Record:
    """This rank's file, durable."""
    with draft.files() as folder, closing(PartsOnDisk(store)) as disk:
        tensors = read_ahead(contents(run, extra, digests), disk)
        writer = ShardWriter(draft.path(shard_name(run.comm.stage.axis.rank)), [each.entry for each in tensors], folder.fd)
        return write_file(writer, tensors, run.bus, lambda nbytes: None)


def load(
    run: RunState, saved: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], present: Present | None = None
) -> dict[str, Any]:
    """See ``Attachment.load``; ``present``: what of the files was brought to the folder, where they are not whole."""
    given = list(saved) if isinstance(saved, (list, tuple)) else [saved]
    ranks = ControlPlane(run.comm.stage, "load", shown_path(given[0]) if given else "[]")
    stages = ControlPlane(run.comm.pp, "load", "all stages")
    targets = _on_stages(stages, lambda: ranks.run(lambda: _destinations(given)))
    nbytes = 0
    run.bus.begin("load", targets[0].name)
    try:
        with ExitStack() as files:
            loading, nbytes, follow = _found(run, ranks, stages, targets, files, present)
            check_stages(run.comm, loading)
            undo: list[Callable[[], None]] = []
            try:
                _on_stages(stages, lambda: ranks.run(lambda: undo.append(loading.hand_over())))
            except CheckpointError:
                # Refused on another rank: here, too, all have what they had.
                for each in undo:
                    each()
                raise
            _on_stages(stages, lambda: ranks.run(lambda: _apply(loading, targets[0])))
            follow()
        return loading.extra
    finally:
        run.bus.end("load", targets[0].name, nbytes)


def _found(
    run: RunState, ranks: ControlPlane, stages: ControlPlane, targets: Sequence[Path], files: ExitStack, present: Present | None
) -> tuple[Loading, int, Callable[[], None]]:
    """What is to be loaded; looked for again where another process has put a newer checkpoint in its place.  Collective."""
    tokens: list[str] = []
    for left in reversed(range(_TRIES)):
        tokens.clear()
        try:
            return _on_stages(stages, lambda: _checked(run, ranks, targets, tokens, files, present))
        except CheckpointError as error:
            # What had been opened is of a checkpoint that is gone: nobody can tell that from damage by the files alone.
            here = error if _tokens(targets) != tokens else None
            replaced = ranks.failed(here) is not None
            if stages.failed(error if replaced else None) is None or not left:
                raise
            files.close()
    raise AssertionError("the last try returns or raises")


def _tokens(targets: Sequence[Path]) -> list[str]:
    """Those of the checkpoints that are there now, as far as there are any."""
    found: list[str] = []
    with suppress(CheckpointError, OSError):
        found.extend(read_manifest(find(target)).token for target in targets if not is_deepspeed(target))
    return found


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
) -> tuple[Loading, int, Callable[[], None]]:
    """Everything that can be wrong with the folders; ``read`` gets the tokens of those of ours.  Collective."""
    foreign = ranks.on_first(lambda: list(map(is_deepspeed, targets)))
    suffixes = ranks.on_first(lambda: list(map(_suffix, targets, foreign)))
    paths = [Path(f"{one}{suffix}") for one, suffix in zip(targets, suffixes, strict=True)]
    place = Place.of(run.comm)

    def opened() -> list[SavedFolder]:
        def folder(path: Path, other: bool) -> SavedFolder:
            if other:
                return deepspeed_folder(read_deepspeed(path), run, place)
            manifest = read_manifest(path)
            read.append(manifest.token)
            return SavedFolder(path, manifest, place, present=present)

        return list(map(folder, paths, foreign))

    found = [files.enter_context(closing(one)) for one in ranks.run(_damaged_or(paths[0], opened))]
    tokens = ranks.on_first(lambda: [one.manifest.token for one in found])

    def folders() -> list[SavedFolder]:
        for one, token in zip(found, tokens, strict=True):
            if one.manifest.token != token:
                raise CheckpointError(
                    f"Cannot load {one.path}. Expected the same checkpoint on all ranks, found a different one than on the "
                    "first rank. Load from a file system that all hosts share."
                )
        return found

    loading, nbytes = ranks.run(_damaged_or(paths[0], lambda: check(run, folders())))
    follow = ranks.run(lambda: run.scaling.checked(loading.folders[0].manifest.about))
    return loading, nbytes, follow


def _suffix(target: Path, foreign: bool) -> str:
    """What is added to the path that was given: by a save that was killed, or the folder that DeepSpeed's latest names."""
    if foreign:
        inner = find_deepspeed(target)
        return "" if inner == target else f"/{inner.name}"
    return find(target).name.removeprefix(target.name)


def _destinations(given: Sequence[Any]) -> list[Path]:
    if not given:
        raise CheckpointError("load expected a folder, or the folders of all stages, found none. Pass one.")
    return [destination(one, "load") for one in given]


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
