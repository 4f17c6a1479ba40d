"""The threads that carry copies, disk requests and updates: started at once or not at all, done with what they were given.

``device/cpu.py``, ``disk/disk_tier.py`` and ``shards/stream.py`` submit to them.  A system that allows no more threads is named
with its limits before anything was submitted; this module never knows what a job does.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from offload.errors import CapabilityError
from offload.work import Ending

__all__ = ["Task", "Workers"]

_Job = Callable[[], None]


class Workers:
    """Threads that do what is submitted, in turn; they hold no reference to who submits, so that it can be collected."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._change = threading.Lock()
        self._stopped = False
        # Daemons, so that a file left open does not hold up the end of the program: its finalizer stops them.
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{index}", daemon=True) for index in range(count)
        ]
        self._started = False

    def start(self) -> None:
        """From now on what is submitted is done; nothing if they were started before.

        Raises:
            CapabilityError: the system does not allow so many threads; those that began have ended.
        """
        with self._change:
            if self._started:
                return
            for place, thread in enumerate(self._threads):
                try:
                    thread.start()
                except RuntimeError as error:
                    self._end(self._threads[:place])
                    # A thread object starts once.
                    self._threads = [
                        threading.Thread(target=_work, args=(self._jobs,), name=one.name, daemon=True) for one in self._threads
                    ]
                    raise _refused(thread.name, len(self._threads), error) from error
            self._started = True

    def submit(self, job: _Job) -> None:
        """Queue ``job``, which must not raise."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Let everything submitted so far end, then the threads."""
        with self._change:
            if self._started and not self._stopped:
                self._stopped = True
                self._end(self._threads)

    def _end(self, threads: list[threading.Thread]) -> None:
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            # The last reference may die in a worker, which then runs the finalizer.
            if thread is not threading.current_thread():
                thread.join()


class Task(Ending):
    """A job as work: what it raises is raised to whoever waits for it.

    Args:
        explain: makes the error to raise of what was raised.
    """

    def __init__(self, job: _Job, explain: Callable[[Exception], Exception] | None = None) -> None:
        super().__init__()
        self._job: _Job | None = job
        self._explain = explain
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the job, once: here, or where this was submitted."""
        # Its memory must not live as long as this does.
        job, self._job = self._job, None
        assert job is not None, "a task runs once"
        try:
            job()
        except BaseException as error:
            self._error = error
        del job
        self.end()

    def error(self) -> BaseException | None:
        """Block until it is over; what was raised."""
        self.join()
        return self._error

    def wait(self) -> None:
        error = self.error()
        if isinstance(error, Exception) and self._explain is not None:
            raise self._explain(error) from error
        if error is not None:
            raise error

    synchronize = wait


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        # Or the memory of a finished job would live until the next one comes.
        del job


def _refused(name: str, count: int, error: RuntimeError) -> CapabilityError:
    limits = [f"{threading.active_count()} Python threads in this process"]
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft != resource.RLIM_INFINITY:
        limits.append(f"ulimit -u {soft} for this user")
    stack, space = resource.getrlimit(resource.RLIMIT_STACK)[0], resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        taken = "unlimited" if stack == resource.RLIM_INFINITY else f"{stack >> 10} KiB"
        limits.append(f"ulimit -v {space >> 10} KiB for all memory, of which each thread takes a stack (ulimit -s {taken})")
    if (pids := _cgroup_pids()) is not None:
        limits.append(f"pids.max {pids} of the control group")
    return CapabilityError(
        f"cannot start thread {name} of {count}. Expected the system to allow it, found {error} ({', '.join(limits)}); raise "
        "ulimit -u or the container's limit on processes, lower [disk] threads, or start fewer ranks or data loaders here"
    )


def _cgroup_pids(root: Path = Path("/")) -> int | None:
    """The limit on tasks of this process's control group, where it says one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        folder = "sys/fs/cgroup/pids" if "pids" in controllers.split(",") else "sys/fs/cgroup" if not controllers else None
        if folder is None:
            continue
        try:
            text = (root / folder / path.lstrip("/") / "pids.max").read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
