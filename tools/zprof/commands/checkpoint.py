"""Owns ``zprof checkpoint``: a folder of ``attachment.save``, DeepSpeed or torch, shown, verified, converted without ranks.

`zprof.cli` hangs the group in. It reads by `offload.shards`, `offload.deepspeed` and `offload.dcp`, and runs nothing
that a folder holds.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offload.errors import CheckpointError, PolicyError
from offload.text import as_size, counted, parse_size, shown
from zprof.problem import Misuse, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from offload.dcp import DistributedModel
    from offload.deepspeed import DeepSpeedModel
    from offload.shards import Entry, SavedModel

    Opened = SavedModel | DeepSpeedModel | DistributedModel

__all__ = ["checkpoint"]

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
FOLDER = click.argument("folder", type=click.Path(path_type=Path))
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
#: Bytes of a file of a sharded model, unless said.
_FILE_MOST = 5 * 10**9


@click.group()
def checkpoint() -> None:
    """Show, verify and convert checkpoints."""


def _opened(folder: Path) -> Opened:
    from offload.dcp import DistributedModel, is_distributed
    from offload.deepspeed import DeepSpeedModel, is_deepspeed, read
    from offload.shards import SavedModel, destination, find

    place = destination(folder, "checkpoint")
    if is_distributed(place):
        return DistributedModel(place)
    return DeepSpeedModel(read(place)) if is_deepspeed(place) else SavedModel(find(place))


@checkpoint.command()
@FOLDER
@AS_JSON
def show(folder: Path, as_json: bool) -> None:
    """Show what the checkpoint in FOLDER contains; reads headers only."""
    from offload.shards import SavedModel

    saved = _opened(folder)
    found = _facts(saved) if isinstance(saved, SavedModel) else saved.facts()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    tensors = found.pop("tensors", {})
    for key, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {_shown(key, each)}" for name, each in value.items()) or "none"
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        click.echo(f"{key:<12}  {_shown(key, value)}")
    for name, about in tensors.items():
        click.echo(f"  {name}  {about}")


def _shown(key: str, value: Any) -> str:
    return as_size(value) if key in ("bytes", "holds") and isinstance(value, int) else str(value)


def _facts(saved: SavedModel) -> dict[str, Any]:
    manifest, holds = saved.manifest, Counter[str]()
    for rank in range(manifest.world):
        with closing(saved.reader(rank)) as reader:
            for entry in reader.entries.values():
                holds[_kind(entry)] += entry.nbytes
    document = saved.document()
    optimizers, objects = document.get("optimizers"), document.get("objects")
    kinds = [one.get("type") for one in optimizers if isinstance(one, dict)] if isinstance(optimizers, list) else []
    written = datetime.fromtimestamp((saved.path / "manifest.json").stat().st_mtime, UTC)
    return {
        "folder": str(saved.path),
        "written": written.strftime("%Y-%m-%d %H:%M:%S UTC"),
        "torch": manifest.about.get("torch"),
        "stage": manifest.about.get("stage"),
        "ranks": manifest.world,
        "mesh": saved.mesh,
        "flat buffers": len(saved.flats),
        "parameters": sum(len(flat.params) for flat in saved.flats),
        "elements": sum(param.numel for flat in saved.flats for param in flat.params),
        "dtypes": sorted({str(flat.dtype).removeprefix("torch.") for flat in saved.flats}),
        "optimizers": [str(kind) for kind in kinds],
        "objects": sorted(map(str, objects)) if isinstance(objects, dict) else [],
        "extra": _keys(document.get("extra")),
        "bytes": sum(record.nbytes for record in manifest.files),
        "holds": dict(sorted(holds.items())),
    }


def _kind(entry: Entry) -> str:
    """What a tensor of a file is, in the words of `attachment.save`."""
    flat = re.fullmatch(r"\d{4,}/(value|gradient|partial|optimizer\d+)(?:/(.*)/[a-z0-9_]+)?", entry.name, re.DOTALL)
    if flat is not None:
        named = {"value": "parameters", "gradient": "gradients", "partial": "sums"}
        return named.get(flat[1]) or f"state {flat[2]}"
    return {"buffer": "buffers", "gradient": "gradients"}.get(entry.name.partition("/")[0], "other")


def _keys(packed: object) -> list[str]:
    """The keys of a dict as a document has it."""
    pairs = packed.get("dict") if isinstance(packed, dict) else None
    return [str(pair[0]) for pair in pairs if isinstance(pair, list) and pair] if isinstance(pairs, list) else []


@checkpoint.command()
@FOLDER
@AS_JSON
def verify(folder: Path, as_json: bool) -> None:
    """Compare every tensor of the checkpoint in FOLDER with its checksum; exit code 1 names the damaged files."""
    saved = _opened(folder)
    files = saved.files()
    total = sum(nbytes for _, nbytes in files)
    damaged: dict[str, str] = {}
    unchecked: list[str] = []
    with _progress("verify", total) as advance:
        for number, (name, _) in enumerate(files):
            try:
                if not saved.verify(number, advance):
                    unchecked.append(name)
            except CheckpointError as error:
                damaged[name] = str(error)
    if as_json:
        told = {"folder": str(saved.path), "ok": not damaged, "files": [name for name, _ in files], "damaged": damaged}
        click.echo(json.dumps(told | {"without checksums": unchecked}, indent=2))
        if damaged:
            raise click.exceptions.Exit(Problem.exit_code)
    elif damaged:
        raise Problem("\n".join(damaged.values()))
    else:
        without = f"; {len(unchecked)} without checksums" if unchecked else ""
        click.echo(f"{saved.path}: ok, {counted(len(files), 'file')}, {as_size(total)}{without}")


@contextmanager
def _progress(label: str, total: int) -> Iterator[Any]:
    """Called with bytes that are done; drawn on a terminal alone."""
    if not sys.stderr.isatty():
        yield lambda nbytes: None
        return
    with click.progressbar(length=total, label=label, file=sys.stderr) as bar:
        yield bar.update


@checkpoint.command()
@FOLDER
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="NAME.safetensors for one file, else a folder."
)
@click.option("--dtype", type=click.Choice(sorted(_DTYPES)), help="Dtype of the parameters; by default the masters'.")
@click.option(
    "--to",
    "kind",
    type=click.Choice(["safetensors", "torch", "dcp"]),
    default="safetensors",
    show_default=True,
    help="torch: one file of torch.save, as attachment.state_dict gives it. dcp: a folder for torch.distributed.checkpoint. "
    "Both have tied tensors under each of their names, and the whole state in memory.",
)
@click.option("--optimizer", is_flag=True, help="Also write the optimizer's states, as state.PARAMETER.KEY.")
@click.option("--max-file", "most", metavar="SIZE", help="The largest file of a folder; by default 5GB.")
@click.option("-f", "--force", is_flag=True, help="Overwrite the file if it is there.")
def convert(
    folder: Path, output: Path, dtype: str | None, kind: str, optimizer: bool, most: str | None, force: bool
) -> None:
    """Write the full parameters and buffers of the checkpoint in FOLDER.

    Safetensors files are written with one flat buffer (a unit) in memory at a time, or one parameter of a DeepSpeed folder.
    """
    from offload.dcp import DistributedModel
    from zprof.commands.checkpoint_states import write_distributed, write_torch
    from zprof.commands.output import check_output

    single = kind == "torch" or (kind == "safetensors" and output.suffix == ".safetensors")
    if kind != "safetensors" and most is not None:
        raise Misuse(f"--max-file: expected --to safetensors, found --to {kind}; leave it out")
    if single and most is not None:
        raise Misuse("--max-file: expected a folder with -o, found one file; name a folder")
    try:
        limit = parse_size(most) if most is not None else _FILE_MOST
    except PolicyError as error:
        raise Misuse(f"--max-file: {error}") from None
    saved = _opened(folder)
    if kind == "dcp" and isinstance(saved, DistributedModel):
        raise Misuse(f"--to dcp: expected a checkpoint in another format, found {folder}, which is in this one; leave it out")
    if single:
        check_output(output, [saved.path / name for name, _ in saved.files()], force=force)
    elif os.path.lexists(output):
        raise Problem(f"{output}: exists already; name another folder with -o")
    elif not output.absolute().parent.is_dir():
        raise Problem(f"{output}: cannot be written: its folder does not exist")
    entries = _converted(saved, dtype) + (saved.state_entries() if optimizer else [])
    files = [entries] if single or kind == "dcp" else _filled(entries, limit)
    groups = saved.groups() if optimizer and kind != "safetensors" else None
    passing = output.with_name(f".{output.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        os.mkdir(passing, 0o700)
        states = saved.states() if optimizer else iter(())
        if kind == "safetensors":
            name = _write(chain(saved.tensors(), states), passing, files)[0]
        else:
            name = "state.pt"
            write = write_torch if kind == "torch" else write_distributed
            model = dict(_values(saved.tensors(), entries))
            model |= {other: model[first] for other, first in saved.tied.items()}
            write(passing / name if single else passing, model, states, groups)
        if single:
            os.replace(passing / name, output)
        else:
            os.rename(passing, output)
    except OSError as error:
        raise Problem(f"{output}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(passing, ignore_errors=True)
    total = sum(entry.nbytes for entry in entries)
    left = saved.others if isinstance(saved, DistributedModel) else []
    without = f"; left out, as neither the model's nor an optimizer's: {', '.join(map(shown, left[:8]))}" if left else ""
    without += f" and {len(left) - 8} more" if len(left) > 8 else ""
    click.echo(f"{output}: {counted(len(entries), 'tensor')}, {as_size(total)}, {counted(len(files), 'file')}{without}")


def _converted(saved: Opened, dtype: str | None) -> list[Entry]:
    import torch

    from offload.shards import Entry

    params = saved.parameters if dtype is not None else ()
    asked: torch.dtype | None = None if dtype is None else getattr(torch, _DTYPES[dtype])

    def chosen(entry: Entry) -> torch.dtype:
        return asked if asked is not None and entry.name in params and entry.dtype.is_floating_point else entry.dtype

    return [Entry(entry.name, chosen(entry), entry.shape) for entry in saved.entries()]


def _filled(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """So many to a file that it keeps to ``limit`` where one tensor alone does."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if files[-1] and size + entry.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.nbytes
    return files


def _write(tensors: Iterator[tuple[str, Tensor]], folder: Path, files: Sequence[Sequence[Entry]]) -> list[str]:
    """The files, and the index that transformers reads where there are several; their names."""
    from offload.shards import ShardWriter
    from zprof.writing import committed

    count = len(files)
    one = count == 1
    names = ["model.safetensors" if one else f"model-{place:05d}-of-{count:05d}.safetensors" for place in range(1, count + 1)]
    with _progress("convert", sum(entry.nbytes for entries in files for entry in entries)) as advance:
        for name, entries in zip(names, files, strict=True):
            writer = ShardWriter(folder / name, entries)
            try:
                for entry in entries:
                    found, tensor = next(tensors)
                    assert found == entry.name, f"expected {entry.name}, found {found}"
                    writer.write(entry.name, [_as(tensor, entry)])
                    advance(entry.nbytes)
                writer.finish()
            except BaseException:
                writer.abort()
                raise
    if not one:
        where = {entry.name: name for name, entries in zip(names, files, strict=True) for entry in entries}
        total = sum(entry.nbytes for entries in files for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        committed(folder / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
    return names


def _values(tensors: Iterator[tuple[str, Tensor]], entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    """The tensors as ``entries`` announce them."""
    for (name, tensor), entry in zip(tensors, entries, strict=False):
        assert name == entry.name, f"expected {entry.name}, found {name}"
        yield name, _as(tensor, entry)


def _as(tensor: Tensor, entry: Entry) -> Tensor:
    made = tensor.to(entry.dtype)
    if made is not tensor and bool((made.isinf() & tensor.isfinite()).any()):
        raise Problem(f"{entry.name}: expected values that {entry.dtype} can hold, found larger ones; choose another --dtype")
    return made
