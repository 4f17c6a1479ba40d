"""Checkpoints of Trainer and Accelerate on another number of ranks than saved: what they count by ranks is right or refused.

``transformers.py`` and ``accelerate.py`` keep facts of the run beside its shards and ask for them before anything is loaded.
What those libraries write per rank (``rng_state_N.pth``, ``random_states_N.pkl``) is of as many ranks; on others the random
states are those that ``Attachment.load`` gives.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.device import started_device
from offload.errors import CheckpointError
from offload.text import counted, shown_path
from zhooks.checkpoint import saved_extra
from zhooks.rng import generators, restore

__all__ = ["RandomStates", "SavedBy", "saved_by"]

_KEY = "zhooks.integrations"


@dataclass(frozen=True, slots=True)
class SavedBy:
    """The run that saved.

    Attributes:
        ranks: how many there were.
        facts: what it noted; nothing in a folder of an older release.
    """

    ranks: int
    facts: dict[str, Any]

    @staticmethod
    def noting(**facts: Any) -> dict[str, Any]:
        """``extra`` for ``Attachment.save``."""
        return {_KEY: facts}

    def check_noted(self, folder: str | os.PathLike[str]) -> None:
        """Refuse the folder of an older release on another number of ranks.

        Raises:
            CheckpointError: nobody noted anything; on every rank, as every rank has the same facts.
        """
        if not self.facts:
            raise CheckpointError(
                f"Cannot load {shown_path(folder)}. Expected as many ranks as saved ({self.ranks}), because an older release "
                f"did not record what its steps were. Resume on {counted(self.ranks, 'rank')}, and save again."
            )

    def check_same(self, folder: str | os.PathLike[str], what: str, key: str, here: Any, instead: str) -> None:
        """Refuse a run in which this number, or each of this list, of ``what`` is another one.

        Raises:
            CheckpointError: it is; on every rank.
        """
        before = self.facts.get(key)
        if before != here:
            raise CheckpointError(
                f"Cannot load {shown_path(folder)}. Expected {_listed(before)} {what}, as in the checkpoint "
                f"({counted(self.ranks, 'rank')}), found {_listed(here)}. {instead}"
            )


def _listed(numbers: object) -> str:
    return ", ".join(map(str, numbers)) if isinstance(numbers, list) else str(numbers)


def saved_by(folder: Path) -> SavedBy:
    """Who saved the shards in ``folder``, as rank 0 reads it.  Collective.

    Raises:
        CheckpointError: there is no checkpoint; on every rank.
    """
    from accelerate.state import PartialState
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [None]
    if PartialState().process_index == 0:
        try:
            ranks, facts = saved_extra(folder, _KEY)
            found = [(ranks, facts if isinstance(facts, dict) else {})]
        except CheckpointError as error:
            found = [str(error)]
    broadcast_object_list(found)
    if isinstance(found[0], str):
        raise CheckpointError(found[0])
    return SavedBy(*found[0])


class RandomStates:
    """The random states of this moment, for when a library has read those of other ranks."""

    def __init__(self) -> None:
        started = started_device()
        self._devices = [] if started is None else [started]
        self._held = generators(self._devices)

    def put_back(self) -> None:
        restore(self._held, self._devices)
