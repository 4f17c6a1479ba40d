"""Which folder and which files a checkpoint of DeepSpeed is, by their names.

Note: [Files]
    ``save_checkpoint(folder)`` writes folder/TAG/ and the TAG into folder/latest; the conversion to a universal checkpoint
    writes latest_universal.  In TAG are model states, of one rank (``mp_rank_00_model_states.pt``) or at stage 3 of each
    (``zero_pp_rank_R_mp_rank_00_model_states.pt``), and optimizer states of each (``..._optim_states.pt``); in a universal one
    ``zero/PARAMETER/fp32.pt`` and so on in their place.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from offload.errors import CheckpointError
from offload.regular_files import read_regular
from offload.text import one_line, shown

__all__ = ["Files", "find", "is_deepspeed", "is_file_of_rank", "list_files", "refused"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_TAG_MOST = 4096
_FILES_MOST = 100_000


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one checkpoint.

    Attributes:
        model: of one rank, or of every data-parallel rank in order.
        optim: of every data-parallel rank in order; none in a universal one.
    """

    path: Path
    model: tuple[Path, ...]
    optim: tuple[Path, ...]
    universal: bool


def is_file_of_rank(name: str) -> bool:
    """Whether a file is called as DeepSpeed calls the states of a rank."""
    return bool(_MODEL.fullmatch(name) or _OPTIM.fullmatch(name))


def is_deepspeed(path: Path) -> bool:
    """Whether a folder looks like one that DeepSpeed saved, or holds such."""
    try:
        names = set(os.listdir(path))
    except OSError:
        return False
    if "manifest.json" in names:
        return False
    if any(map(_MODEL.fullmatch, names)) or "latest_universal" in names:
        return True
    try:
        return "latest" in names and is_deepspeed(path / _tag(path, "latest"))
    except CheckpointError:
        # It is meant for one; why it cannot be read is said when it is.
        return True


def _tag(path: Path, name: str) -> str:
    try:
        tag = read_regular(path / name, _TAG_MOST).decode().strip()
    except (OSError, ValueError) as error:
        raise refused(path, f"{name}, which cannot be read ({error})") from error
    if not tag or "/" in tag or "\0" in tag or tag in (".", "..", name):
        raise refused(path, f"{name}, which names {shown(tag)}")
    return tag


def find(path: Path) -> Path:
    """The folder of one checkpoint: ``path``, or the one in it that its ``latest`` names.

    Raises:
        CheckpointError: there is none.
    """
    names = _names(path) if path.is_dir() else set()
    if any(map(_MODEL.fullmatch, names)):
        return path
    # Of both the one that was saved for training on; a universal one is named by its own path.
    for name in ("latest", "latest_universal"):
        if name in names:
            tag = _tag(path, name)
            if not (path / tag).is_dir():
                raise refused(path, f"{name}, which names {shown(tag)}, and no such folder")
            return path / tag
    raise refused(path, "neither model states nor a file called latest")


def list_files(path: Path) -> Files:
    """The files in the folder of one checkpoint.

    Raises:
        CheckpointError: ranks are missing, or it is divided over other than data-parallel ranks.
    """
    names = sorted(_names(path))
    if len(names) > _FILES_MOST:
        raise refused(path, f"{len(names)} files")
    for name in names:
        if name.startswith("layer_") and "expert" not in name and name.endswith(".pt"):
            raise refused(path, f"{name} of a pipeline module, whose layers are separate files")
        if "expert" in name and name.endswith("states.pt"):
            raise refused(path, f"{name} of a mixture of experts, of which each rank has different ones")
    model = {found: path / name for name in names if (found := _MODEL.fullmatch(name))}
    optim = {found: path / name for name in names if (found := _OPTIM.fullmatch(name))}
    parts = sorted({int(found[2]) for found in (*model, *optim)} - {0})
    if parts:
        raise refused(path, f"{len(parts) + 1} parts over tensor or pipeline parallel ranks (mp_rank_{parts[0]:02d})")
    universal = (path / "zero").is_dir() and not optim
    if not model:
        raise refused(path, "no model states")
    if not optim and not universal:
        raise refused(path, "no optimizer states (*_optim_states.pt), as stage 0 has none")
    return Files(path, _in_order(path, model), _in_order(path, optim), universal)


def _names(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))
    except OSError as error:
        raise refused(path, f"a folder that cannot be read ({error.strerror or error})") from error


def _in_order(path: Path, found: dict[re.Match[str], Path]) -> tuple[Path, ...]:
    """By rank, without gaps."""
    ranks = {int(match[1] or 0): file for match, file in found.items()}
    if len(ranks) != len(found):
        raise refused(path, f"two files of one rank ({sorted(file.name for file in found.values())[0]})")
    missing = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if missing is not None:
        raise refused(path, f"{len(ranks)} files like {next(iter(found.values())).name} without that of rank {missing}")
    return tuple(ranks[rank] for rank in range(len(ranks)))


def refused(path: Path, found: str) -> CheckpointError:
    """Why a folder is none that can be read."""
    return CheckpointError(
        f"Cannot read {path}. Expected a checkpoint that DeepSpeed saved at ZeRO stage 1, 2 or 3 over data-parallel ranks, or "
        f"its universal one, found {one_line(found)[:400]}. Name that folder, copy it again, or write full weights with "
        "DeepSpeed (its zero_to_fp32.py) and load those."
    )
