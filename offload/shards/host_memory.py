"""The folder on a tmpfs in which the ranks of one job on one host keep checkpoints that outlive their processes.

Note: [Whose memory]
    ``ROOT/zhooks-UID`` is this user's alone (0700, and no link), so whatever lies in it was made by us under this user.  Each
    job has a folder ``job-HASH`` in it, of its run id.  Marks in it name processes: ``launcher-...`` the one that started ranks
    (torchrun's agent), which lives on while ranks are started again, and ``rank-...`` each rank.  A job is over once every
    process with a mark has certainly ended; its folder goes when another job of this user starts, and one of the same run id
    finds it again.  Ranks that live and are of another session are another job of the same run id, which is refused.  All of
    this happens under a lock on the user's folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from offload.budget import THIS_MACHINE
from offload.disk import Owner, started_ticks
from offload.errors import CapabilityError, CheckpointError
from offload.pages import ALIGN
from offload.shards.folder import Folder
from offload.text import shown_path

__all__ = ["HostMemory", "check_memory", "copy_name", "job_of", "remove_dead_jobs"]

_JOB = re.compile(r"job-[0-9a-f]{16}")
_MARK = re.compile(r"(?:launcher|rank)-[0-9a-f-]+")
_GENERATION = re.compile(r"gen-([0-9a-f]{16})")
#: Sessions of this process whose attachment still is there.
_living: set[str] = set()


def job_of(given: str | None) -> str:
    """The name of this job, by which ranks that are started again find what they kept.

    Args:
        given: [resilience] job; None takes torchrun's run id.
    Raises:
        CapabilityError: there is none.
    """
    if given is not None:
        return f"named {given}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        raise CapabilityError(
            "The memory of peers needs a run id by which restarted ranks find it, found no TORCHELASTIC_RUN_ID. "
            "Start the job with torchrun, or name it: [resilience] job."
        )
    # torchrun's own default is the same for all jobs; what tells them apart is the agent, which lives as long as the job.
    return f"launched by {_launcher().page().decode()}" if run_id in ("", "none") else f"run {run_id}"


def _launcher() -> Owner:
    """The process that started this one, and starts it again."""
    here, parent = Owner.here(), os.getppid()
    started = started_ticks(parent) if parent else None
    return here if started is None else replace(here, pid=parent, started_ticks=started)


def check_memory(root: Path, job: str | None) -> None:
    """Whether this process can have kept anything in memory, or find it again.

    Raises:
        CapabilityError: it cannot.
    """
    job_of(job)
    _check_root(root)


def copy_name(rank: int) -> str:
    """The file that another host keeps of a rank's."""
    return f"copy-{rank:05d}.safetensors"


class HostMemory:
    """One job's folder on this host, marked by this process as in use until ``close`` or ``remove``.

    Args:
        root: a folder on a tmpfs.
        job: from `job_of`.
        session: 16 hexadecimal digits that the ranks of one start share, and no others have.
    Attributes:
        identity: the same for whoever sees this folder, and for nobody else.
        device: the same for whoever shares its space.
    Raises:
        CapabilityError: no memory is to be had here.
        CheckpointError: the folder is not ours, or another job uses it.
    """

    def __init__(self, root: Path, job: str, session: str) -> None:
        self._root, self._session = root, session
        self._home = _home(root, make=True)
        self.path = self._home / _folder_of(job)
        here = Owner.here()
        with Folder(self._home) as home, _locked(home):
            _remove_dead(home, but=self.path.name)
            with suppress(FileExistsError):
                os.mkdir(self.path.name, 0o700, dir_fd=home.fd)
            with Folder(self.path.name, home) as folder:
                self._tidy(folder)
                for owner, name in ((_launcher(), "launcher-{}-{}"), (here, f"rank-{session}-{{}}-{{}}")):
                    with suppress(FileExistsError):
                        folder.create(name.format(owner.pid, owner.started_ticks), owner.page())
                self.identity = f"{here.boot} {folder.status.st_dev} {folder.status.st_ino}"
                self.device = f"{here.boot} {folder.status.st_dev}"
        self._mark = f"rank-{session}-{here.pid}-{here.started_ticks}"
        _living.add(session)
        weakref.finalize(self, _living.discard, session)

    def _tidy(self, folder: Folder) -> None:
        """Remove what ranks that have ended left beside their checkpoints.

        Raises:
            CheckpointError: there are others that have not.
        """
        marks = _marks(folder)
        for name, owner in marks.items():
            if owner is not None and name.startswith("rank-") and not name.startswith(f"rank-{self._session}-"):
                raise CheckpointError(
                    f"The memory of peers at {shown_path(self.path)} needs only this job's ranks, found the live process "
                    f"{owner.pid} of another job with the same run id, or of another model's attachment. Give each its own "
                    "name: torchrun --rdzv-id, or [resilience] job."
                )
        for name, owner in marks.items():
            if owner is None:
                os.unlink(name, dir_fd=folder.fd)
        for name in folder.names():
            if name.startswith("load-") and not name.startswith(f"load-{self._session}-"):
                shutil.rmtree(name, dir_fd=folder.fd)

    def free(self) -> int:
        """Bytes that may still be written here."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def generations(self) -> dict[str, dict[str, int]]:
        """What lies here by the token of its save: each file and its size."""
        found: dict[str, dict[str, int]] = {}
        with Folder(self.path) as folder:
            for name in folder.names():
                token = _GENERATION.fullmatch(name)
                inside = folder.folder(name) if token else None
                if token and inside is not None:
                    with inside:
                        sizes = {each: inside.size(each) for each in inside.names()}
                        found[token[1]] = {each: size for each, size in sizes.items() if size is not None}
        return found

    def generation(self, token: str, *, make: bool = False) -> Path:
        """The folder of one save."""
        path = self.path / f"gen-{token}"
        if make:
            path.mkdir(0o700, exist_ok=True)
        return path

    @contextmanager
    def scratch(self, rank: int) -> Iterator[Path]:
        """A folder of this rank's for as long as it loads."""
        path = self.path / f"load-{self._session}-{rank}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def drop(self, token: str) -> None:
        """Remove one save's files here; the manifest first, which says that it is one."""
        path = self.generation(token)
        with suppress(OSError):
            (path / "manifest.json").unlink()
        shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """This process uses it no more; what was saved stays for ranks that are started again.  Idempotent."""
        _living.discard(self._session)
        with suppress(OSError):
            (self.path / self._mark).unlink()

    def remove(self) -> None:
        """The job is over: the last rank that says so removes its folder."""
        self.close()
        with suppress(OSError), Folder(self._home) as home, _locked(home):
            inside = home.folder(self.path.name)
            if inside is None:
                return
            with inside:
                used = any(owner is not None and name.startswith("rank-") for name, owner in _marks(inside).items())
            if not used:
                shutil.rmtree(self.path.name, dir_fd=home.fd)


def remove_dead_jobs(root: Path, job: str | None) -> None:
    """Free what other jobs of this user that are over left in this host's memory; ``job``: [resilience] job.

    What this job left is its own to find, whoever starts its ranks again: a wrapper around each ends with it.
    """
    mine = ""
    with suppress(CapabilityError):
        mine = _folder_of(job_of(job))
    with suppress(OSError, CapabilityError, CheckpointError):
        home = root / f"zhooks-{os.geteuid()}"
        if home.is_dir():
            # Whoever has the lock may have been stopped; another attach tidies then.
            with Folder(_home(root, make=False)) as folder, _locked(folder, fcntl.LOCK_NB):
                _remove_dead(folder, but=mine)


def _folder_of(job: str) -> str:
    return f"job-{hashlib.blake2b(job.encode(), digest_size=8).hexdigest()}"


def _remove_dead(home: Folder, but: str) -> None:
    for name in home.names():
        folder = home.folder(name) if name != but and _JOB.fullmatch(name) else None
        if folder is None:
            continue
        with folder:
            over = not any(_marks(folder).values())
        if over:
            with suppress(OSError):
                shutil.rmtree(name, dir_fd=home.fd)


def _check_root(root: Path) -> None:
    if not root.is_dir() or not THIS_MACHINE.is_memory(root):
        found = "no such folder" if not root.is_dir() else "a folder on a disk"
        raise CapabilityError(
            f"The memory of peers at {shown_path(root)} needs a folder in memory (tmpfs), found {found}. Point [resilience] "
            "memory at one, e.g. /dev/shm."
        )


def _home(root: Path, *, make: bool) -> Path:
    """This user's folder.

    Raises:
        CapabilityError: there is no such memory.  CheckpointError: it is not this user's alone.
    """
    _check_root(root)
    home = root / f"zhooks-{os.geteuid()}"
    try:
        if make:
            with suppress(FileExistsError):
                home.mkdir(0o700)
        status = os.lstat(home)
    except OSError as error:
        raise CapabilityError(
            f"The memory of peers at {shown_path(root)} needs a folder that this user may write to, found {error.strerror}. "
            "Point [resilience] memory at another tmpfs."
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        mode = f"one of uid {status.st_uid}, mode {status.st_mode & 0o777:o}"
        found = mode if stat.S_ISDIR(status.st_mode) else "a link or a file"
        raise CheckpointError(
            f"The memory of peers at {shown_path(home)} needs a private folder of this user (0700), found {found}. Remove it, "
            "or point [resilience] memory at another tmpfs."
        )
    return home


@contextmanager
def _locked(folder: Folder, how: int = 0) -> Iterator[None]:
    fcntl.flock(folder.fd, fcntl.LOCK_EX | how)
    try:
        yield
    finally:
        fcntl.flock(folder.fd, fcntl.LOCK_UN)


def _marks(folder: Folder) -> dict[str, Owner | None]:
    """The processes that marked a job's folder; None of those that have certainly ended.

    Marks are written under the lock, so that a torn one is of a process that was killed.
    """
    found: dict[str, Owner | None] = {}
    for name in folder.names():
        if _MARK.fullmatch(name):
            page = folder.read(name, ALIGN)
            owner = None if page is None else Owner.of_page(page)
            here = owner == Owner.here() and name.startswith("rank-") and name.split("-")[1] not in _living
            found[name] = None if owner is None or owner.is_over() or here else owner
    return found
