"""Pools of real ranks: worker processes with a Gloo group, started once per world size and given one test job at a
time.

The fixtures of conftest.py own the pools; tests hand them functions named "module:function" with keyword arguments
that pickle. A pool never shares a process group between two jobs, and never keeps a worker whose rank raised, died or
fell silent.

Note: [One job]
The parent sends the job to every rank; each makes a fresh group on the pool's store, calls the function and answers.
When all ranks have returned, and only then, they are told to leave: collect garbage, barrier, destroy the group. If
one raised or died, the others may wait in a collective for ever: they get a short grace, their stacks are written
down, and the whole pool is killed; the next job starts a new one.
"""

from __future__ import annotations

import enum
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.support.collector import collect_all
from tests.support.parent import end_with_parent
from tests.support.waiting import soon

PRELOADED = [
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch.nn.parallel", "hypothesis", "numba", "pytest", "zhooks",
]  # fmt: skip
# A limit is for what hangs: no test may fail because the machine is busy.
LIMIT_S = 300.0
START_LIMIT_S = 600.0
# To write its stack, or to end.
ANSWER_LIMIT_S = 60.0
# Other ranks often raise the same error a moment later; their tracebacks are worth a short wait.
GRACE_S = 2.0
LOG_TAIL_BYTES = 4000


class End(enum.Enum):
    """How a job ended on one rank."""

    RETURNED = "returned"
    SKIPPED = "skipped"
    RAISED = "raised"
    DIED = "died"
    SILENT = "silent"


#: The rank's process is as it was before the job.
_WHOLE = (End.RETURNED, End.SKIPPED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's end of one job: the value it returned, or the text that explains why there is none."""

    rank: int
    end: End
    value: Any = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """The parent's side of one rank."""

    rank: int
    process: BaseProcess
    pipe: Connection
    folder: Path

    def log(self) -> str:
        """The end of what the rank wrote on its standard streams."""
        return _tail(self.folder / f"rank{self.rank}.log")

    def stack(self) -> str:
        """Where each thread of the rank is now; empty when the process does not answer."""
        path = self.folder / f"rank{self.rank}.stack"
        if self.process.pid is None or not self.process.is_alive():
            return ""
        os.kill(self.process.pid, signal.SIGUSR1)
        # Written from a signal handler, thread by thread, this process's main thread last.
        soon(lambda: "_serve" in _tail(path), within_s=ANSWER_LIMIT_S)
        return _tail(path)


class RanksFailed(AssertionError):
    """A job did not return on every rank; the message holds each rank's traceback, or its stack and the end of its
    log.
    """

    def __init__(self, job: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        summary = ", ".join(f"rank {outcome.rank} {outcome.end.value}" for outcome in outcomes)
        parts = [f"{job}: expected every rank to return, found {summary}"]
        for outcome in outcomes:
            if outcome.end not in _WHOLE:
                parts.append(f"---- rank {outcome.rank} {outcome.end.value}\n{outcome.text.rstrip()}")
        super().__init__("\n".join(parts))


class Pool:
    """``world`` worker processes, started at the first job and again after a job that failed.

    With ``accelerator`` each has the asynchronous accelerator of tests/accelerator, rank r its device r, and groups that work
    on it; every job starts under the lazy schedule.
    """

    def __init__(self, world: int, *, accelerator: bool = False) -> None:
        self.world = world
        self._accelerator = accelerator
        self._workers: list[Worker] = []
        self._folder: Path | None = None
        self._jobs = 0

    def run(self, job: str, *, limit_s: float = LIMIT_S, **kwargs: Any) -> list[Any]:
        """Call ``job`` on every rank and return the values, rank by rank.

        Args:
            job: "module:function" or "module:name.name", imported in the workers.
            limit_s: seconds, from sending the job to the last answer.
            kwargs: must pickle; every rank gets the same.
        Raises:
            RanksFailed: a rank raised, died or did not answer in time.
            pytest.skip.Exception: no rank did, and one has skipped the job.
        """
        outcomes = self.attempt(job, limit_s=limit_s, **kwargs)
        if any(outcome.end not in _WHOLE for outcome in outcomes):
            raise RanksFailed(job, outcomes)
        for outcome in outcomes:
            if outcome.end is End.SKIPPED:
                pytest.skip(outcome.text)
        return [outcome.value for outcome in outcomes]

    def attempt(self, job: str, *, limit_s: float = LIMIT_S, **kwargs: Any) -> list[Outcome]:
        """As ``run``, but for jobs meant to fail: return how each rank ended."""
        if not self._workers:
            self._start()
        self._jobs += 1
        self._send(("run", self._jobs, job, kwargs, limit_s))
        outcomes = self._collect(limit_s)
        if all(outcome.end in _WHOLE for outcome in outcomes):
            self._send(("leave",))
            left = self._collect(limit_s)
            if any(outcome.end is not End.RETURNED for outcome in left):
                outcomes = left
        if any(outcome.end not in _WHOLE for outcome in outcomes):
            self.kill()
        return outcomes

    def close(self) -> None:
        """Let idle workers end by themselves, kill those that do not, and remove the pool's files."""
        self._send(None)
        for worker in self._workers:
            worker.process.join(5.0)
        self.kill()

    def kill(self) -> None:
        """End every worker at once; the next job starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        context = forks()
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, theirs, str(self._folder), self._accelerator)
            process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank{rank}of{self.world}")
            process.start()
            theirs.close()
            self._workers.append(Worker(rank, process, ours, self._folder))
        port = None
        for worker in self._workers:
            # Rank 0 hosts the store and names its port; the others need it before they can join.
            worker.pipe.send_bytes(pickle.dumps(port))
            if not worker.pipe.poll(START_LIMIT_S):
                self.kill()
                raise TimeoutError(f"rank {worker.rank} of {self.world} did not start in {START_LIMIT_S:.0f} s")
            port = pickle.loads(worker.pipe.recv_bytes())

    def _send(self, message: object) -> None:
        data = pickle.dumps(message)
        for worker in self._workers:
            try:
                worker.pipe.send_bytes(data)
            except OSError:
                # A dead rank is reported by _collect, which sees its pipe closed.
                continue

    def _collect(self, limit_s: float) -> list[Outcome]:
        deadline = time.monotonic() + limit_s
        waiting = {worker.pipe: worker for worker in self._workers}
        outcomes: dict[int, Outcome] = {}
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker = waiting.pop(pipe)
                outcome = _receive(worker)
                outcomes[worker.rank] = outcome
                if outcome.end is not End.RETURNED:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for worker in waiting.values():
            text = f"no answer within {limit_s:g} s, or within {GRACE_S:g} s of another rank's failure\n"
            outcomes[worker.rank] = Outcome(worker.rank, End.SILENT, text=text + worker.stack() + worker.log())
        return [outcomes[worker.rank] for worker in self._workers]


def forks() -> ForkServerContext:
    """Starts processes that have torch and zhooks imported: forks of one server, for all of this session."""
    # It imports these once and has no threads of its own, so a fork of it is cheap and safe.
    context = get_context("forkserver")
    whole = ["tests.support.preload"] if "PYTEST_XDIST_WORKER" in os.environ else []
    context.set_forkserver_preload(["tests.support.fork_server", *PRELOADED, *whole, "tests.support.fork_ready"])
    _serve_forks_of_this_checkout()
    return context


def _serve_forks_of_this_checkout() -> None:
    """Start the fork server with this process' path, which it would learn only after it has imported what it preloads."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(str(Path(folder).resolve()) for folder in sys.path if Path(folder).is_dir())
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _receive(worker: Worker) -> Outcome:
    try:
        end, payload = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(ANSWER_LIMIT_S)
        return Outcome(worker.rank, End.DIED, text=f"exit code {worker.process.exitcode}\n{worker.log()}")
    if end is End.RETURNED:
        return Outcome(worker.rank, end, value=payload)
    return Outcome(worker.rank, end, text=payload)


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")


# ---- the worker's side


def _serve(rank: int, world: int, pipe: Connection, folder: str, accelerator: bool) -> None:
    end_with_parent()
    with (Path(folder) / f"rank{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.stdout = open(1, "w", closefd=False, buffering=1)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    stack = (Path(folder) / f"rank{rank}.stack").open("w")
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stack)
    if sys.platform == "linux":
        # Gloo resolves the host's name otherwise, which can be slow or wrong where the tests run.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch

    from tests.support.torches import ignore_its_own_warnings

    torch.set_num_threads(1)
    if accelerator:
        from tests.accelerator.accel import load

        os.environ["ACCEL_DEVICES"] = str(max(2, world))
        load()
    store = _join(rank, world, pipe)
    warnings.simplefilter("error")
    # Small models of the parity matrix have no blocks: there a policy that recomputes has nothing to recompute.
    warnings.filterwarnings("ignore", message=r"\[activation\] checkpoint")
    ignore_its_own_warnings()
    # Everything imported so far is here to stay: collecting after each job need not look at it.
    gc.collect()
    gc.freeze()
    while (message := _next(pipe)) is not None:
        _, number, job, kwargs, limit_s = message
        pipe.send_bytes(_answer(rank, world, store, number, job, kwargs, limit_s))
        if _next(pipe) is None:
            return
        pipe.send_bytes(_leave(world))


def _next(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        # The parent is gone.
        return None


def _join(rank: int, world: int, pipe: Connection) -> Any:
    """Rank 0 hosts the pool's store on a free port and tells the parent; the others connect to it."""
    from torch.distributed import TCPStore

    port = pickle.loads(pipe.recv_bytes())
    timeout = timedelta(seconds=START_LIMIT_S)
    if world == 1:
        store = None
    elif rank == 0:
        store = TCPStore("127.0.0.1", 0, world, is_master=True, timeout=timeout, wait_for_workers=False)
        port = store.port
    else:
        store = TCPStore("127.0.0.1", port, world, is_master=False, timeout=timeout, wait_for_workers=False)
    pipe.send_bytes(pickle.dumps(port))
    return store


def _answer(rank: int, world: int, store: Any, number: int, job: str, kwargs: Any, limit_s: float) -> bytes:
    import torch
    import torch.distributed as dist

    environment = dict(os.environ)
    try:
        if world > 1:
            timeout = timedelta(seconds=limit_s)
            prefixed = dist.PrefixStore(f"job{number}", store)
            backend = "cpu:gloo,accel:accel" if hasattr(torch, "accel") else "gloo"
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=timeout)
        if hasattr(torch, "accel"):
            torch.accel.set_device(rank)
            torch.accel.native.set_schedule("lazy")
        torch.manual_seed(0)
        return pickle.dumps((End.RETURNED, find(job)(**kwargs)))
    except pytest.skip.Exception as skipped:
        return pickle.dumps((End.SKIPPED, str(skipped)))
    except BaseException:
        return pickle.dumps((End.RAISED, traceback.format_exc()))
    finally:
        _restore(environment)


def _leave(world: int) -> bytes:
    import torch.distributed as dist

    try:
        # Work handles and meshes kept alive by cycles would outlive the group they belong to, and of a model that was not
        # detached the shared memory.
        collect_all()
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
        _forget()
        # What a job has imported is here to stay too.
        gc.freeze()
        return pickle.dumps((End.RETURNED, None))
    except BaseException:
        return pickle.dumps((End.RAISED, f"while leaving the group, after the job returned\n{traceback.format_exc()}"))


def _restore(environment: dict[str, str]) -> None:
    """Undo what a job, or a library that it called, has written into os.environ."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


def _forget() -> None:
    """Clear what libraries keep for a whole process, which the next job would find."""
    if "torch.distributed.tensor" in sys.modules:
        # DTensor remembers what operations gave, meshes of this job's group included.
        from torch.distributed.tensor import DTensor, debug

        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()
        else:
            # torch 2.8 has one cache, and no name for clearing it.
            dispatcher: Any = DTensor._op_dispatcher
            dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    if "accelerate" in sys.modules:
        # Every Trainer makes this state, and the next Accelerator would have to agree with it.
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


def find(job: str) -> Any:
    """The object named by "module:name.name"."""
    module, _, path = job.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found
