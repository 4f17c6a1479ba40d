"""Owns the spans of a training loop that waits for torch's DataLoader, and the notes of which loaders there are.

The recorder opens it once torch is loaded, and closes it at its end. It changes neither batches nor their order, puts nothing
into workers, and a mistake of its own ends its recording with a note, never the script.

Note: [Where loaders are heard]
    torch puts a `record_function` around each ``next`` of a loader, which only a running profiler hears. So two functions are
    replaced while a recording runs: ``_BaseDataLoaderIter.__next__``, in which the loop waits for a batch, or makes it where
    there are no workers, and ``DataLoader.__iter__``, which starts the workers.

Note: [Whose wait it is]
    Some programs call ``next`` on a thread of their own, beside training. Once another thread steps an optimizer, that is
    loading, and nobody's wait.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from zprof.recording.watching import Shared, Watch
from zprof.replacing import put_around
from zprof.rows import RowKind

__all__ = ["FIRST", "LOADERS", "LOADING", "STARTING", "WAIT", "LoaderListener", "watch_loaders", "worker_names"]

#: The note of the loaders; the span of a wait, and of the same on a thread beside training.
LOADERS, WAIT, LOADING = "loaders", "wait data", "load data"
#: Behind a loader's name: its first batch, for which no worker has worked ahead; its workers are started.
FIRST, STARTING = " (first batch)", " (starting workers)"

_BEGIN, _END = int(RowKind.BEGIN), int(RowKind.END)
_MOST_LOADERS = 64
_MOST_NAME = 100
_OTHERS = "other loaders"

Row = Callable[[int, str, str, int], None]


@dataclass(frozen=True, slots=True, eq=False)
class LoaderListener:
    """A recording.

    Attributes:
        row: takes (kind, what, key, nbytes). wanted: whether it wants any now.
        seen: called with the body of the note, at the begin and for every new loader.
        failed: called with why nothing more is seen.
    """

    row: Row
    wanted: Callable[[], bool]
    seen: Callable[[Mapping[str, object]], None]
    failed: Callable[[str], None]


class _Watch(Watch[LoaderListener]):
    """What hangs in torch, once a process, however many recordings there are."""

    def __init__(self) -> None:
        super().__init__()
        #: What tells a loader from others -> its name. A loader that is made anew each epoch is the same one.
        self._names: dict[tuple[object, ...], str] = {}
        self._known: list[dict[str, object]] = []
        self._iterators: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        #: A loader whose workers are being started, and the processes that were there before.
        self._starting: tuple[str, set[int]] | None = None
        #: The thread that steps optimizers; None before the first step.
        self._training: int | None = None

    # Its life.

    def hang(self, undo: ExitStack) -> None:
        """Replace the two functions."""
        undo.callback(register_optimizer_step_pre_hook(self._stepping).remove)
        undo.callback(put_around(dataloader._BaseDataLoaderIter, "__next__", self._next))
        undo.callback(put_around(dataloader.DataLoader, "__iter__", self._iter))

    # What torch calls.

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._training = threading.get_ident()

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:
            begun = self._begin(iterator)
            if begun is None:
                return original(iterator)
            try:
                return original(iterator)
            finally:
                self._say(_END, *begun)

        return __next__

    def _iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __iter__(loader: Any) -> Any:
            begun = self._begin_workers(loader)
            try:
                iterator = original(loader)
            finally:
                if begun is not None:
                    self._say(_END, *begun)
                    self._starting = None
            self._took(loader, iterator)
            return iterator

        return __iter__

    # What is made of it.

    def _begin(self, iterator: Any) -> tuple[str, str] | None:
        """(what, key) of a wait that has begun, where anybody wants to know."""
        try:
            if not self.wanted():
                return None
            key = self._iterators.get(iterator)
            if key is None:
                # Made before the recording began.
                key = self._iterators[iterator] = _dataset(getattr(iterator, "_dataset", None))
            begun = self._what(), key if getattr(iterator, "_num_yielded", 1) else key + FIRST
            self._say(_BEGIN, *begun)
        except Exception as error:
            self.fail(error)
            return None
        return begun

    def _begin_workers(self, loader: Any) -> tuple[str, str] | None:
        """Workers that persist are started once."""
        try:
            starts = loader.num_workers > 0 and getattr(loader, "_iterator", None) is None
            if not starts or not self.wanted():
                return None
            name = self._name(loader)
            begun = self._what(), name + STARTING
            self._starting = name, set(_processes())
            self._say(_BEGIN, *begun)
        except Exception as error:
            self.fail(error)
            return None
        return begun

    def _took(self, loader: Any, iterator: Any) -> None:
        try:
            if self.wanted():
                self._iterators[iterator] = self._name(loader)
        except Exception as error:
            self.fail(error)

    def _what(self) -> str:
        return WAIT if self._training in (None, threading.get_ident()) else LOADING

    def _name(self, loader: Any) -> str:
        """The loader's name; a new one is noted."""
        facts = {
            "dataset": _dataset(loader.dataset),
            "sampler": type(loader.sampler).__name__[:_MOST_NAME],
            "workers": loader.num_workers,
            "batch": loader.batch_size if loader.batch_size is not None else getattr(loader.batch_sampler, "batch_size", None),
            "prefetch": loader.prefetch_factor,
            "persistent": loader.persistent_workers,
            "pinned": loader.pin_memory,
        }
        # A dataset may have numbers and texts of types of its own; a note holds plain ones.
        plain = {name: value for name, value in facts.items() if value is None or type(value) in (bool, int, str)}
        same = tuple(plain.items())
        if same not in self._names:
            if len(self._names) >= _MOST_LOADERS:
                return _OTHERS
            alike = sum(1 for known in self._known if known["dataset"] == facts["dataset"])
            name = f"{facts['dataset']} ({alike + 1})" if alike else str(facts["dataset"])
            self._names[same] = name
            self._known.append({"name": name, **plain})
            for each in self.listeners:
                if each.wanted():
                    each.seen(self.body())
        return self._names[same]

    def body(self) -> dict[str, object]:
        """The note: what there is so far."""
        return {"loaders": list(self._known), "cores": len(os.sched_getaffinity(0))}

    def workers(self) -> dict[int, str]:
        found: dict[int, str] = {}
        starting = self._starting
        if starting is not None:
            name, before = starting
            found = dict.fromkeys((pid for pid in _processes() if pid not in before), f"{name}, a worker")
        # Other threads begin and end iterators meanwhile.
        with suppress(RuntimeError):
            for iterator, name in tuple(self._iterators.items()):
                for number, process in enumerate(getattr(iterator, "_workers", ())):
                    with suppress(ValueError, AttributeError):
                        if process.pid:
                            found[process.pid] = f"{name}, worker {number}"
        return found

    def _say(self, kind: int, what: str, key: str) -> None:
        for each in self.listeners:
            if each.wanted():
                each.row(kind, what, key, 0)


def _processes() -> Iterator[int]:
    """The pids of what multiprocessing has started here."""
    known: Any = getattr(sys.modules.get("multiprocessing.process"), "_children", ())
    with suppress(RuntimeError):
        for process in tuple(known):
            with suppress(ValueError, AttributeError):
                if process.pid:
                    yield process.pid


def _dataset(dataset: Any) -> str:
    """A dataset by its class; of a part of one both."""
    name = type(dataset).__name__
    if name == "Subset" and hasattr(dataset, "dataset"):
        name = f"{name} of {type(dataset.dataset).__name__}"
    return name[:_MOST_NAME]


_shared = Shared(_Watch)


def watch_loaders(listener: LoaderListener) -> Callable[[], None]:
    """Report to ``listener`` until what is returned has been called.

    Raises:
        Exception: this torch lacks what it takes; nothing of it is left then.
    """
    leave = _shared.join(listener)
    if _shared.watch is not None:
        listener.seen(_shared.watch.body())
    return leave


def worker_names() -> dict[int, str]:
    """The workers of the loaders that are iterated now: pid -> "Rows, worker 0"."""
    watch = _shared.watch
    return {} if watch is None else watch.workers()
