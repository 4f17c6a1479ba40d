"""How ranks that write beside training agree without a collective: each leaves in the folder what became of its file.

Note: [Who waits for whom]
    Each rank makes a file that says which process it is, writes its shard file, and leaves an outcome: the record of the file,
    or why there is none.  The first rank alone waits for all, and commits or removes the folder; the others see that the mark
    of the save is gone, and whether a manifest is there.  Who waits gives up when a process it waits for has ended without an
    outcome, or when nothing in the folder has changed for as long as ranks have patience with each other.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import BaseModel, ValidationError

from offload.disk import Owner
from offload.errors import CheckpointError
from offload.pages import ALIGN
from offload.shards.folder import Folder
from offload.shards.manifest import MANIFEST, MANIFEST_MOST, Record

__all__ = ["FailedElsewhere", "Outcomes"]

#: Seconds between looks into the folder: often at first, for most ranks end together.
_SHORTEST, _LONGEST = 0.001, 0.2


class FailedElsewhere(CheckpointError):
    """What failed did so on another rank, which knows why."""


class _Outcome(BaseModel):
    """The record of a rank's file, or why there is none."""

    record: Record | None = None
    failed: str = ""


class Outcomes:
    """One rank's view of the folder of a save in which every rank writes at its own pace.

    Args:
        folder: held open until the rank is done.
        subject: the target, for errors.
        patience_s: how long nothing may change in the folder.
    """

    def __init__(self, folder: Folder, token: str, rank: int, world: int, subject: str, patience_s: float) -> None:
        self._folder, self._mark, self._rank, self._world = folder, f"saving-{token}", rank, world
        self._subject, self._patience_s = subject, patience_s
        folder.create(_name(rank, "owner"), Owner.here().page())

    def succeeded(self, record: Record) -> None:
        """This rank's file is durable.

        Raises:
            FailedElsewhere: nobody waits for it any more.
        """
        try:
            self._leave(_Outcome(record=record))
        except OSError as error:
            if self._folder.entry(self._mark) is not None:
                raise
            raise self._given_up() from error

    def failed(self, why: str) -> None:
        """There is none; the folder may be gone."""
        with suppress(OSError):
            self._leave(_Outcome(failed=why))

    def _leave(self, outcome: _Outcome) -> None:
        # Never seen half written.
        name = _name(self._rank, "outcome")
        self._folder.create(f"{name}-part", json.dumps(outcome.model_dump()).encode())
        self._folder.rename(f"{name}-part", name)

    def collect(self) -> list[Record]:
        """Every rank's record, once no rank writes any more; the files that said so are removed.  The first rank only.

        Raises:
            FailedElsewhere: some rank has none.  CheckpointError: some rank will never say, or the folder is gone.
        """
        found: dict[int, Record | str] = {}

        def missing() -> list[int]:
            if self._folder.entry(self._mark) is None:
                raise CheckpointError(
                    f"Cannot save {self._subject}. Expected the folder that this save works in, found that it was removed. "
                    "Save again."
                )
            for rank in range(self._world):
                outcome = None if rank in found else self._outcome(rank)
                if outcome is not None:
                    found[rank] = outcome
            return [rank for rank in range(self._world) if rank not in found]

        self._wait(missing)
        records: list[Record] = []
        for rank, outcome in sorted(found.items()):
            if isinstance(outcome, str):
                raise FailedElsewhere(f"rank {rank}: {outcome}")
            records.append(outcome)
        for rank in found:
            for kind in ("owner", "outcome"):
                os.unlink(_name(rank, kind), dir_fd=self._folder.fd)
        return records

    def committed(self) -> None:
        """Wait until the first rank has put the folder in its place; every other rank.

        Raises:
            FailedElsewhere: it never will.
        """
        self._wait(lambda: [] if self._folder.entry(self._mark) is None else [0])
        if self._folder.size(MANIFEST) is None:
            raise self._given_up()

    def _given_up(self) -> FailedElsewhere:
        return FailedElsewhere(
            f"Cannot save {self._subject}. Expected every rank to write its file, found that the first rank gave up. See its "
            "error."
        )

    def _outcome(self, rank: int) -> Record | str | None:
        raw = self._folder.read(_name(rank, "outcome"), MANIFEST_MOST)
        if raw is None:
            return None
        try:
            outcome = _Outcome.model_validate_json(raw)
        except ValidationError:
            outcome = _Outcome()
        return outcome.record or outcome.failed or "left an outcome that is damaged. Save again."

    def _wait(self, missing: Callable[[], Sequence[int]]) -> None:
        """Until nobody is missing any more."""
        pause, seen, silent_s, nobody = _SHORTEST, None, 0.0, threading.Event()
        while ranks := missing():
            for rank in ranks:
                page = self._folder.read(_name(rank, "owner"), ALIGN)
                owner = None if page is None else Owner.of_page(page)
                if owner is None or not owner.is_over():
                    continue
                # It may have left its outcome and ended since.
                if rank in missing():
                    raise CheckpointError(
                        f"Cannot save {self._subject}. Expected rank {rank} to write its file, found that its process has "
                        "ended. Load the last checkpoint."
                    )
                break
            entries = [(name, self._folder.entry(name)) for name in sorted(self._folder.names())]
            before, seen = seen, [(name, each.st_size, each.st_mtime_ns) for name, each in entries if each is not None]
            silent_s = silent_s + pause if seen == before else 0.0
            if silent_s > self._patience_s:
                raise CheckpointError(
                    f"Cannot save {self._subject}. Expected rank {ranks[0]} to write its file, found that nothing has changed "
                    f"for {self._patience_s:.0f} s ([comm] timeout_s). Look at that rank and its file system."
                )
            nobody.wait(pause)
            pause = min(2 * pause, _LONGEST)


def _name(rank: int, kind: str) -> str:
    return f"rank-{rank:05d}.{kind}"
