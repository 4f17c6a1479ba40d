"""Save and resume of sharded runs: every rank writes its own file, one rename commits them all, and every rank reads back.

``attach.py`` calls ``save`` and ``load`` for the Attachment's methods.  Each step that can fail on one rank fails on all, so
no rank is left waiting; before a load has been found possible everywhere, nothing is changed anywhere.  It never gathers a
parameter and never decides on which tier values are.
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
from offload.shards import Draft, Manifest, Record, ShardReader, ShardWriter, destination, find, read_manifest, shard_name
from offload.text import shown_path
from zhooks.checkpoint.check_shard import check
from zhooks.checkpoint.load_shard import Loading
from zhooks.checkpoint.saved_layout import describe, difference
from zhooks.checkpoint.shard_contents import FileTensor, RunState, contents, whole_digests
from zhooks.comm import AllRanks, one_stage_a_path

__all__ = ["load", "save"]


@torch.no_grad()
def save(run: RunState, folder: str | os.PathLike[str], extra: Mapping[str, Any]) -> None:
    """See ``Attachment.save``."""
    ranks = AllRanks(run.comm.stage, "save", shown_path(folder))
    target = ranks.run(lambda: destination(folder, "save"))
    one_stage_a_path(run.comm, "save", ranks.share(str(target)))
    draft = Draft(target, ranks.share(secrets.token_hex(8)))
    run.bus.begin("save", target.name)
    nbytes = 0
    try:
        ranks.on_first(draft.open)
        digests = ranks.share(ranks.run(lambda: whole_digests(run)))
        record = ranks.run(lambda: _write(run, draft, extra, digests))
        nbytes = record.nbytes
        raws = ranks.collect(record.model_dump_json().encode())
        about = {**run.about, **run.scaling.saved(), "flats": describe(run), "torch": torch.__version__}
        ranks.on_first(lambda: draft.commit(about, [Record.model_validate_json(raw) for raw in raws]))
    except BaseException:
        if ranks.first:
            draft.discard()
        raise
    finally:
        draft.close()
        run.bus.end("save", target.name, nbytes)


def _write(run: RunState, draft: Draft, extra: Mapping[str, Any], digests: Mapping[str, str]) -> Record:
    """This rank's file, durable."""
    with draft.files() as dir_fd:
        return _write_file(run, draft.path(shard_name(run.comm.stage.axis.rank)), dir_fd, contents(run, extra, digests))


def _write_file(run: RunState, path: Path, dir_fd: int, tensors: Sequence[FileTensor]) -> Record:
    writer = ShardWriter(path, [tensor.entry for tensor in tensors], dir_fd)
    try:
        for tensor in tensors:
            if tensor.key:
                run.bus.begin("save", tensor.key, tensor.entry.nbytes)
            writer.write(tensor.entry.name, tensor.chunks())
            if tensor.key:
                run.bus.end("save", tensor.key, tensor.entry.nbytes)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


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
