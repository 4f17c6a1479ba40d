"""Owns how the live figures of a rank reach Prometheus: an HTTP endpoint that it scrapes, or a file for a node exporter.

`zprof.commands.run` opens them in the process that waits for the script, and looks in while it waits. prometheus_client serves
and writes; nothing of it runs in the process that trains, and no trouble of its own ends the wait.

Note: [Stale]
    A rank that does not record shows `zprof_recording` 0 and nothing of the last seconds. When the wait is over the endpoint
    is gone and the file is removed, so that Prometheus marks all of it as stale; of a wait that was killed the file stays,
    with the time of its last row in it.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offload.errors import CapabilityError
from offload.regular_files import open_regular
from zprof.clock import now_ns
from zprof.problem import CapabilityProblem, Problem
from zprof.running.child import PASSED_ON
from zprof.running.live import Awaited
from zprof.writing import committing

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["served", "written"]

_EVERY_NS = 5_000_000_000
#: What a file of ours begins with.
_OURS = b"# HELP zprof_"


class _Figures:
    """Those of one rank, as they are when asked for; also by a thread of the endpoint."""

    def __init__(self, trace: Path, rank: int, host: str) -> None:
        from zprof.show.exports.prometheus import labels

        self._run = Awaited(trace)
        self._labels = labels(trace, rank, host)
        self._lock = threading.Lock()
        self._told = False

    def collect(self) -> list[Metric]:
        """As prometheus_client's registry wants it."""
        from zprof.show.exports.prometheus_live import families

        seen = None
        with self._lock:
            try:
                seen = self._run.look()
            except Exception as error:
                # The script goes on, whatever is wrong with its trace or with us.
                if not self._told:
                    self._told = True
                    click.echo(f"zprof: no live figures: {type(error).__name__}: {error}", err=True)
            return list(families(seen, self._labels))


def _figures(trace: Path, rank: int, host: str) -> _Figures:
    from zprof.show.exports.prometheus import client

    try:
        client()
    except CapabilityError as error:
        raise CapabilityProblem(str(error)) from None
    return _Figures(trace, rank, host)


@contextmanager
def served(address: str, port: int, trace: Path, rank: int, host: str) -> Iterator[Callable[[], None]]:
    """Serve the figures of ``trace``, which is begun from now on, at http://address:port/metrics; what is given does nothing.

    Raises:
        CapabilityProblem: prometheus_client is not installed.  Problem: nothing can listen there.
    """
    figures = _figures(trace, rank, host)
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(figures)
    # Threads of the server take no signal that is meant for the script: `Child` waits for them on this thread.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*PASSED_ON, signal.SIGCHLD))
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        where = f"--prometheus {address}:{port}"
        why = getattr(error, "strerror", None) or error
        raise Problem(f"{where}: expected to listen there: {why}; name another port, or use --prometheus-file") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield lambda: None
    finally:
        server.shutdown()
        server.server_close()
        thread.join(1.0)


@contextmanager
def written(path: Path, trace: Path, rank: int, host: str) -> Iterator[Callable[[], None]]:
    """Keep the figures of ``trace`` in ``path``, for a node exporter's textfile folder, while what is given is called often.

    Raises:
        CapabilityProblem: prometheus_client is not installed.  Problem: the file cannot be written, or is another's.
    """
    file = _File(path, _figures(trace, rank, host))
    file.begin()
    try:
        yield file.look
    finally:
        file.remove()


class _File:
    def __init__(self, path: Path, figures: _Figures) -> None:
        self._path, self._figures = path, figures
        self._written_ns = 0
        self._identity: tuple[int, int] | None = None
        self._told = False

    def begin(self) -> None:
        shown = f"--prometheus-file {self._path}"
        if self._path.suffix != ".prom":
            raise Problem(f"{shown}: expected a name that ends in .prom, which node exporters read; rename it")
        if os.path.lexists(self._path) and not _ours(self._path):
            raise Problem(f"{shown}: expected no file, or one of zprof's, found another; remove it, or name another")
        try:
            self._write()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise Problem(f"{shown}: cannot be written: {why}; name another") from None

    def look(self) -> None:
        """Write it anew, every few seconds."""
        if now_ns() - self._written_ns < _EVERY_NS:
            return
        try:
            self._write()
        except OSError as error:
            # Full, or its folder is gone: the script goes on, and the next try may do better.
            if not self._told:
                self._told = True
                click.echo(f"zprof: {self._path}: cannot be written: {error.strerror}; its figures are out of date", err=True)

    def remove(self) -> None:
        """Unless somebody put another file there."""
        with suppress(OSError):
            if self._is_mine():
                self._path.unlink()

    def _is_mine(self) -> bool:
        found = self._path.lstat()
        return (found.st_dev, found.st_ino) == self._identity

    def _write(self) -> None:
        from zprof.show.exports.prometheus import exposition

        self._written_ns = now_ns()
        # Its reader is another user.
        with committing(self._path, mode=0o644) as file:
            file.write(exposition(self._figures.collect()))
            file.flush()
            os.fsync(file.fileno())
            # Last of all: what came before may have taken long.
            if self._identity is not None and os.path.lexists(self._path) and not self._is_mine():
                raise OSError(errno.EEXIST, "another file is there now")
        found = self._path.lstat()
        self._identity = found.st_dev, found.st_ino


def _ours(path: Path) -> bool:
    """What a wait that was killed left there, or an earlier export."""
    try:
        with open(open_regular(path, follow=False), "rb") as file:
            return file.read(len(_OURS)) == _OURS
    except (OSError, ValueError):
        return False
