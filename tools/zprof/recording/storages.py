"""Owns the table of live storages: what each is held for, and the rows that say when that begins, changes and ends.

The recorder's observers call ``hold``; torch's storages report their own death through weak references. It never keeps one
alive, and imports no torch.

Note: [Freed when it dies]
    PyTorch keeps the Python object of a storage as long as the storage itself lives, once it was asked for, so that a weak
    reference to it ends exactly when the memory is given back, whoever held it last, autograd's own nodes included. The
    callback runs wherever that happens, also inside ``hold`` and on any thread: it takes no lock and only appends a row.
    A storage cannot die while ``hold`` runs for it, so that no callback comes between the rows of one change.

Note: [Who made it]
    What a storage is held for changes: what ``empty`` made becomes a parameter. The lines that made it do not, so they are
    kept with the storage and are part of the key in each of its rows, whoever names it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from zprof.rows import BEFORE_STACK, RowKind

__all__ = ["Storages"]

_ALLOC, _FREE = int(RowKind.ALLOC), int(RowKind.FREE)

Held = tuple[str, str, int]
"""What for, by whom, and how many bytes."""

#: Keys with stacks that are kept as one text; those of later ones are put together for each row.
MOST_TEXTS = 1 << 16


class _Watch(weakref.ref[Any]):
    """A storage, what it is held for, and the lines that made it."""

    __slots__ = ("address", "guessed", "ident", "key", "nbytes", "stack", "what")

    address: int
    ident: int
    nbytes: int
    what: str
    key: str
    stack: str
    guessed: bool


class Storages:
    """Every storage somebody has named; any thread may call.

    Args:
        write: takes (kind, what, key, nbytes, ident): a row without its time.
        change: takes the old and the new (what, key, nbytes) of one storage, and its ident: it is freed and allocated anew at
            one time. Two rows are written without it.
    """

    def __init__(
        self,
        write: Callable[[int, str, str, int, int], None],
        change: Callable[[Held, Held, int], None] | None = None,
    ) -> None:
        self._write = write
        self._change = self._write_both if change is None else change
        self._live: dict[int, _Watch] = {}
        self._next = count(1)
        self._texts: dict[tuple[str, str], str] = {}
        # Two threads may name one storage at once. Re-entrant: what writes a row may come back here.
        self._naming = threading.RLock()

    def __len__(self) -> int:
        return len(self._live)

    def hold(self, what: str, key: str, storage: Any, *, guess: bool = False, stack: str = "") -> None:
        """``storage`` (a ``torch.UntypedStorage``) is held for (``what``, ``key``) from now on, until it dies or is held anew.

        Args:
            guess: from somebody who only infers it; never replaces what was said by who knows.
            stack: the lines that made it, where it is new; see Note: [Who made it].
        """
        address, nbytes = storage._cdata, storage.nbytes()
        known = self._live.get(address)
        # Stated again and again; most often nothing is new.
        if known is not None and (known.key, known.what, known.nbytes, known.guessed) == (key, what, nbytes, guess):
            return
        with self._naming:
            known = self._live.get(address)
            if known is None:
                self._add(address, what, key, nbytes, storage, guess, stack)
                return
            if guess and not known.guessed:
                what, key = known.what, known.key
            else:
                known.guessed = guess
            if (known.what, known.key, known.nbytes) != (what, key, nbytes):
                before = known.what, self._text(known), known.nbytes
                known.what, known.key, known.nbytes = what, key, nbytes
                self._change(before, (what, self._text(known), nbytes), known.ident)

    def knows(self, address: int) -> bool:
        """A storage with this address (``_cdata``) is in the table."""
        return address in self._live

    def said(self, address: int) -> tuple[str, str, bool] | None:
        """(what, key, guessed) of a storage in the table."""
        watch = self._live.get(address)
        return None if watch is None else (watch.what, watch.key, watch.guessed)

    def _add(self, address: int, what: str, key: str, nbytes: int, storage: Any, guess: bool, stack: str) -> None:
        watch = _Watch(storage, self._gone)
        watch.address, watch.ident, watch.nbytes = address, next(self._next), nbytes
        watch.what, watch.key, watch.guessed, watch.stack = what, key, guess, stack
        self._live[address] = watch
        self._write(_ALLOC, what, self._text(watch), nbytes, watch.ident)

    def _text(self, watch: _Watch) -> str:
        """The key of its rows."""
        if not watch.stack:
            return watch.key
        # One text for all alike: its hash, which each row needs, is then known.
        text = self._texts.get((watch.key, watch.stack))
        if text is None:
            text = f"{watch.key}{BEFORE_STACK}{watch.stack}"
            if len(self._texts) < MOST_TEXTS:
                self._texts[watch.key, watch.stack] = text
        return text

    def _write_both(self, before: Held, after: Held, ident: int) -> None:
        self._write(_FREE, *before, ident)
        self._write(_ALLOC, *after, ident)

    def _gone(self, watch: _Watch) -> None:
        if self._live.get(watch.address) is watch:
            del self._live[watch.address]
        self._write(_FREE, watch.what, self._text(watch), watch.nbytes, watch.ident)

    def alive(self) -> Iterator[tuple[str, str, int]]:
        """(what, key, nbytes) of every storage in the table."""
        for watch in tuple(self._live.values()):
            yield watch.what, watch.key, watch.nbytes

    def forget(self) -> None:
        """Watch nothing any more; what was alive stays so in the rows."""
        self._live.clear()
