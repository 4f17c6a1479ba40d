"""Full parameters and buffers as one safetensors file, written unit by unit from rank 0.

``attachment/state.py`` calls it for ``Attachment.save_full``.  A file is complete or absent.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from offload.errors import CheckpointError
from offload.events import Bus
from offload.shards import Entry, Folder, destination
from offload.text import shown_path
from zhooks.checkpoint.ignored_values import check_alike
from zhooks.checkpoint.save_load import one_stage_a_path
from zhooks.checkpoint.whole_folder import Recipe, WrittenTo, write_files
from zhooks.comm import Comm, ControlPlane
from zhooks.compiled import plain_name
from zhooks.layout import Ignored
from zhooks.unit import Unit

_VERB = "save_full"


@torch.no_grad()
def save_full(
    model: nn.Module, units: Sequence[Unit], comm: Comm, bus: Bus, target: str | os.PathLike[str], ignored: Ignored
) -> None:
    """See ``Attachment.save_full``.  Tied parameters are written under each name: a strict load succeeds."""
    ranks = ControlPlane(comm.stage, _VERB, shown_path(target))
    path = ranks.run(lambda: destination(target, _VERB, "file"))
    ranks.run(lambda: _check_plain(ignored))
    ranks.on_first(lambda: _check_replaceable(path, Path(target)))
    check_alike(model, ignored, comm, _VERB)
    state = model.state_dict(keep_vars=True)
    held = {plain_name(name): tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held.items()]
    one_stage_a_path(comm, _VERB, str(path))
    made = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        into = WrittenTo(_VERB, path, lambda: Folder(path.parent))
        write_files(held, units, comm, bus, [Recipe((entry.name,), (entry,)) for entry in entries], {made.name: entries}, into)
        ranks.on_first(lambda: os.replace(made, path))
    except BaseException:
        with suppress(OSError):
            if ranks.first:
                made.unlink(missing_ok=True)
        raise


def _check_plain(ignored: Ignored) -> None:
    """A file that a plain model loads has all of it.

    Raises:
        CheckpointError: the model has frozen tensor subclasses, whose values their library alone can write.
    """
    for name, one in ignored.frozen.items():
        raise CheckpointError(
            f"save_full expected plain parameters, found {len(ignored.frozen)} frozen of tensor subclasses ({name} is a "
            f"{one.kind}), which safetensors cannot hold. Use save(), or state_dict(), which leaves them out and says so, "
            "or save only the adapters."
        )


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
