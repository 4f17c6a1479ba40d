"""Save and resume of sharded runs: every rank writes its own file, one rename commits them all, and every rank reads back.

``attach.py`` calls ``save`` and ``load`` for the Attachment's methods.  Each step that can fail on one rank fails on all, so
no rank is left waiting; before a load has been found possible everywhere, nothing is changed anywhere.  It never gathers a
parameter and never decides where values rest.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from offload.errors import CheckpointError, ZhooksError
from offload.policy_text import shown_path
from offload.shard_file import Record, ShardReader, ShardWriter
from offload.shard_set import Draft, Manifest, destination, find, read_manifest, shard_name
from zhooks.shard_contents import Live, Part, buffer_digests, contents
from zhooks.shard_loading import Loading, check
from zhooks.sharded import Spec
from zhooks.together import Together, one_stage_a_path

__all__ = ["Live", "load", "save"]


@torch.no_grad()
def save(live: Live, folder: str | os.PathLike[str], extra: Mapping[str, Any]) -> None:
    """See ``Attachment.save``."""
    ranks = Together(live.comm.stage, "save", shown_path(folder))
    target = ranks.run(lambda: destination(folder, "save"))
    one_stage_a_path(live.comm, "save", ranks.share(str(target)))
    draft = Draft(target, ranks.share(secrets.token_hex(8)))
    live.bus.begin("save", target.name)
    nbytes = 0
    try:
        ranks.on_first(draft.open)
        digests = ranks.share(ranks.run(lambda: buffer_digests(live.model)))
        record = ranks.run(lambda: _write(live, draft, extra, digests))
        nbytes = record.nbytes
        raws = ranks.collect(record.model_dump_json().encode())
        about = {**live.about, **live.scaling.saved(), "flats": describe(live), "torch": torch.__version__}
        ranks.on_first(lambda: draft.commit(about, [_record(raw) for raw in raws]))
    except BaseException:
        if ranks.first:
            draft.discard()
        raise
    finally:
        draft.close()
        live.bus.end("save", target.name, nbytes)


def _record(raw: bytes) -> Record:
    return Record.model_validate_json(raw)


def _write(live: Live, draft: Draft, extra: Mapping[str, Any], digests: Mapping[str, str]) -> Record:
    """This rank's file, durable."""
    with draft.files() as dir_fd:
        return _write_file(live, draft.path(shard_name(live.comm.stage.axis.rank)), dir_fd, contents(live, extra, digests))


def _write_file(live: Live, path: Path, dir_fd: int, parts: Sequence[Part]) -> Record:
    writer = ShardWriter(path, [part.entry for part in parts], dir_fd)
    try:
        for part in parts:
            if part.key:
                live.bus.begin("save", part.key, part.entry.nbytes)
            writer.write(part.entry.name, part.pieces())
            if part.key:
                live.bus.end("save", part.key, part.entry.nbytes)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def load(live: Live, saved: str | os.PathLike[str]) -> dict[str, Any]:
    """See ``Attachment.load``."""
    ranks = Together(live.comm.stage, "load", shown_path(saved))
    target = ranks.run(lambda: destination(saved, "load"))
    live.bus.begin("load", target.name)
    nbytes = 0
    try:
        suffix = ranks.share(ranks.run(lambda: find(target).name.removeprefix(target.name) if ranks.first else ""))
        folder = target.with_name(target.name + suffix)
        manifest = ranks.run(lambda: read_manifest(folder))
        token = ranks.share(manifest.token)
        with ExitStack() as files:
            loading = ranks.run(_damaged_or(folder, lambda: _check(live, folder, manifest, token, files)))
            follow = ranks.run(lambda: live.scaling.checked(manifest.about))
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
        live.bus.end("load", target.name, nbytes)


def _apply(loading: Loading, target: Path) -> None:
    try:
        loading.apply()
    except Exception as error:
        found = str(error) if isinstance(error, ZhooksError) else f"{type(error).__name__}: {error}."
        raise CheckpointError(
            f"load {target}: expected to finish what was verified, found: {found} The run is partly loaded now: mend that and "
            "load again."
        ) from error


def _check(live: Live, folder: Path, manifest: Manifest, token: str, files: ExitStack) -> Loading:
    """Everything that can be wrong with the checkpoint on this rank."""
    rank, size = live.comm.stage.axis.rank, live.comm.stage.axis.world
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
    problem = difference(manifest.about.get("flats"), describe(live))
    if problem:
        raise CheckpointError(
            f"load {folder}: expected the model and policy that were saved (stage {manifest.about.get('stage')}), found "
            f"{problem}. Build the same model and attach it with the same policy and mesh."
        )
    reader = files.enter_context(closing(ShardReader(folder, manifest.files[rank])))
    lead = reader if rank == 0 else files.enter_context(closing(ShardReader(folder, manifest.files[0])))
    return check(live, reader, lead)


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


def describe(live: Live) -> list[dict[str, Any]]:
    """What must be the same for a file to fit: every flat buffer's name, dtype, cut and parameters."""
    return [
        {
            "name": flat.name,
            "dtype": str(flat.kind.master).removeprefix("torch."),
            "padded": flat.layout.padded,
            "shard_numel": flat.shard_numel,
            "segments": [[segment.start, segment.numel] for segment in flat.layout.segments],
            "params": [
                {"name": spec.name, "shape": list(spec.shape), "stride": list(spec.stride), "start": start} | _over_tp(spec)
                for spec, start in zip(flat.specs, flat.layout.starts, strict=True)
            ],
        }
        for flat in live.flats
    ]


def _over_tp(spec: Spec) -> dict[str, Any]:
    """The dim that is divided over tp and the number of parts; nothing where there is none."""
    return {} if spec.place is None else {"tp": [spec.place[0], spec.place[2]]}


def difference(saved: Any, here: list[dict[str, Any]]) -> str:
    """The first thing in which two descriptions differ, in words; empty when they are the same."""
    if saved == here:
        return ""
    try:
        return _first_difference(saved, here)
    except (TypeError, KeyError, AttributeError, IndexError):
        return "a description of another kind in the checkpoint"


def _first_difference(saved: list[dict[str, Any]], here: list[dict[str, Any]]) -> str:
    for old, new in zip(saved, here, strict=False):
        pairs = list(zip(old["params"], new["params"], strict=False))
        for one, other in pairs:
            if one["name"] != other["name"]:
                return f"parameter {other['name']} where the checkpoint has {one['name']}, in unit {new['name']}"
        if len(old["params"]) != len(new["params"]):
            return f"{len(new['params'])} parameters in unit {new['name']} where the checkpoint has {len(old['params'])}"
        for what in ("shape", "stride"):
            for one, other in pairs:
                if one[what] != other[what]:
                    return f"parameter {other['name']} of {what} {other[what]} where the checkpoint has {one[what]}"
        for one, other in pairs:
            if one.get("tp") != other.get("tp"):
                found, had = other.get("tp", "none"), one.get("tp", "none")
                return f"parameter {other['name']} divided over tp by (dim, parts) {found} where the checkpoint has {had}"
        for what in ("dtype", "segments", "shard_numel", "padded", "params", "name"):
            if old[what] != new[what]:
                return f"unit {new['name']} of {what} {_brief(new[what])} where the checkpoint has {_brief(old[what])}"
    return f"{len(here)} flat buffers where the checkpoint has {len(saved)}"


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
