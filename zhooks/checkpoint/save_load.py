"""Save and resume of sharded runs: every rank writes its own file, one rename commits them all, and every rank reads back.

``attached_state.py`` calls ``save``, ``save_beside`` and ``load`` for the Attachment's methods.  Each step that can fail on
one rank fails on all, so no rank is left waiting; before a load has been found possible everywhere, nothing is changed
anywhere.  It never gathers a parameter and never decides on which tier values are.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from offload.errors import CheckpointError, ZhooksError
from offload.shards import (
    Draft,
    Manifest,
    Record,
    Series,
    ShardReader,
    ShardWriter,
    destination,
    find,
    read_manifest,
    shard_name,
)
from offload.text import shown_path
from zhooks.checkpoint.background import Commit, Saving, Writing, write_file
from zhooks.checkpoint.check_shard import check
from zhooks.checkpoint.load_shard import Loading
from zhooks.checkpoint.saved_layout import describe, difference
from zhooks.checkpoint.shard_contents import FileTensor, RunState, contents, whole_digests
from zhooks.checkpoint.snapshot import Snapshot
from zhooks.comm import AllRanks, one_stage_a_path

__all__ = ["load", "save", "save_beside"]

Take = Callable[[Sequence[FileTensor]], Snapshot]


@torch.no_grad()
def save(run: RunState, folder: str | os.PathLike[str], extra: Mapping[str, Any], series: Series) -> Saving:
    """See ``Attachment.save``."""
    ranks, draft = _begin(run, folder, series)
    target = draft.target
    run.bus.begin("save", target.name)
    nbytes = 0
    try:
        ranks.on_first(draft.open)
        digests = ranks.share(ranks.run(lambda: whole_digests(run)))
        record = ranks.run(lambda: _write(run, draft, extra, digests))
        nbytes = record.nbytes
        raws = ranks.collect(record.model_dump_json().encode())
        commit = Commit(draft, _about(run), series, run.bus)
        ranks.on_first(lambda: commit([Record.model_validate_json(raw) for raw in raws]))
    except BaseException:
        if ranks.first:
            draft.discard()
        raise
    finally:
        draft.close()
        run.bus.end("save", target.name, nbytes)
    return Saving(target, ranks, None, nbytes)


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
        digests = ranks.share(ranks.run(lambda: whole_digests(run)))
        about = _about(run)
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
    return Saving(draft.target, ranks, begun[0])


def _begin(run: RunState, folder: str | os.PathLike[str], series: Series) -> tuple[AllRanks, Draft]:
    """Where every rank writes to, found possible."""
    ranks = AllRanks(run.comm.stage, "save", shown_path(folder))

    def found() -> Path:
        target = destination(folder, "save")
        series.check(target)
        return target

    target = ranks.run(found)
    one_stage_a_path(run.comm, "save", ranks.share(str(target)))
    return ranks, Draft(target, ranks.share(secrets.token_hex(8)))


def _about(run: RunState) -> dict[str, Any]:
    return {**run.about, **run.scaling.saved(), "flats": describe(run), "torch": torch.__version__}


def _write(run: RunState, draft: Draft, extra: Mapping[str, Any], digests: Mapping[str, str]) -> Record:
    """This rank's file, durable."""
    with draft.files() as dir_fd:
        tensors = contents(run, extra, digests)
        writer = ShardWriter(draft.path(shard_name(run.comm.stage.axis.rank)), [each.entry for each in tensors], dir_fd)
        return write_file(writer, tensors, run.bus, lambda nbytes: None)


def load(run: RunState, saved: str | os.PathLike[str]) -> dict[str, Any]:
    """See ``Attachment.load``."""
    ranks = AllRanks(run.comm.stage, "load", shown_path(saved))
    target = ranks.run(lambda: destination(saved, "load"))
    run.bus.begin("load", target.name)
    nbytes = 0
    try:
        suffix = ranks.share(ranks.run(lambda: find(target).name.removeprefix(target.name) if ranks.first else ""))
        folder = target.with_name(target.name + suffix)
        manifest = ranks.run(lambda: read_manifest(folder))
        token = ranks.share(manifest.token)
        with ExitStack() as files:
            loading = ranks.run(_damaged_or(folder, lambda: _check(run, folder, manifest, token, files)))
            follow = ranks.run(lambda: run.scaling.checked(manifest.about))
            nbytes = manifest.files[ranks.rank].nbytes
            undo: list[Callable[[], None]] = []
            try:
                ranks.run(lambda: undo.append(loading.hand_over()))
            except CheckpointError:
                # Refused on another rank: here, too, all have what they had.
                for each in undo:
                    each()
                raise
            ranks.run(lambda: _apply(loading, target))
            follow()
        return loading.extra
    finally:
        run.bus.end("load", target.name, nbytes)


def _apply(loading: Loading, target: Path) -> None:
    try:
        loading.apply()
    except Exception as error:
        found = str(error) if isinstance(error, ZhooksError) else f"{type(error).__name__}: {error}."
        raise CheckpointError(
            f"load {target}: expected to finish what was verified, found: {found} The run is partly loaded now: correct "
            "that and load again."
        ) from error


def _check(run: RunState, folder: Path, manifest: Manifest, token: str, files: ExitStack) -> Loading:
    """Everything that can be wrong with the checkpoint on this rank."""
    rank, size = run.comm.stage.axis.rank, run.comm.stage.axis.world
    if manifest.token != token:
        raise CheckpointError(
            f"load {folder}: expected one checkpoint on all ranks, found another than the first rank's. Load from a file "
            "system that all hosts share."
        )
    if manifest.world != size:
        raise CheckpointError(
            f"load {folder}: expected a checkpoint of {size} rank(s) as in this run, found one of {manifest.world}. Load it on "
            f"{manifest.world} rank(s), and write attachment.state_dict() or save_full() there for another number."
        )
    problem = difference(manifest.about.get("flats"), describe(run))
    if problem:
        raise CheckpointError(
            f"load {folder}: expected the model and policy that were saved (stage {manifest.about.get('stage')}), found "
            f"{problem}. Build the same model and attach it with the same policy and mesh."
        )
    reader = files.enter_context(closing(ShardReader(folder, manifest.files[rank])))
    lead = reader if rank == 0 else files.enter_context(closing(ShardReader(folder, manifest.files[0])))
    return check(run, reader, lead)


def _damaged_or(folder: Path, step: Callable[[], Loading]) -> Callable[[], Loading]:
    """A file with right checksums that still is none of ours."""

    def checked() -> Loading:
        try:
            return step()
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"load {folder}: expected contents that attachment.save() wrote, found {type(error).__name__}: {error}. Load "
                "another checkpoint."
            ) from error

    return checked
