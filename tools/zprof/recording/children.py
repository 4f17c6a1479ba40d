"""Owns what is sampled of the processes that the recorded one has started, and of theirs: who, how much, how busy.

The recorder samples it as it samples the process. It looks from outside, at what the kernel says of them: nothing is put into a
child, none is waited for, and a recording that has no children pays one system call a sample.

Note: [What counts once]
    Forked processes share the pages that none has written to, and a loader's workers hand their batches over in shared memory:
    each one's resident bytes hold all of that. So the sums are of "pss", in which a page that four processes have is a quarter
    for each. The kernel has to walk over all pages for it, which is why it is read more seldom than resident bytes, and why a
    round over many processes is spread over several samples.

Note: [What is a child]
    Of a process that has begun just now the kernel may still show its parent's memory, until it runs what it was started for:
    it counts from `_SETTLED_NS` on. A process that outlives the one that has started it is its child no longer. Pids come
    again, so that one is known by the time it began, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zprof.clock import boot_ns, now_ns
from zprof.recording.processes import Shares, Stat, command, descendants, executable, queued_ns, shares
from zprof.recording.sampler import Reading

__all__ = ["CHILDREN", "KINDS", "LOADERS", "OTHERS", "PYTHON", "ChildrenSampler"]

#: The note: who held what when all of them held most.
CHILDREN = "children"
LOADERS, PYTHON, OTHERS = "loader workers", "python", "others"
#: Keys of the samples.
KINDS = (LOADERS, PYTHON, OTHERS)

#: Looks take at most a hundredth of a core, rounds over pages, for which the kernel walks them beside the script, a fiftieth.
_LOOKS, _ROUNDS = 100, 50
_ROUND_NS = 1_000_000_000
#: A round sooner than that, where they hold so much more than at the last.
_GROWN = 1.1
#: One sample reads pages no longer than this, but for those of one process.
_ROUND_PART_NS = 20_000_000
_SETTLED_NS = 50_000_000
#: A note is written where they hold so much more than the last one says.
_NEWS = 1.05
_MOST_NAMED = 16
_MOST_LABEL = 120
#: What torch calls the first thread of a loader's worker.
_WORKER = "pt_data_worker"
_OF_MULTIPROCESSING = {
    "multiprocessing.resource_tracker": "multiprocessing's resource tracker",
    "multiprocessing.forkserver": "the forkserver",
}

#: A pid, and when it began.
_Key = tuple[int, int]


class _Child:
    """One process, as it was last seen."""

    __slots__ = ("asked", "cpu_ns", "kind", "label", "name", "queued_ns", "rss", "seen", "shares")

    def __init__(self, stat: Stat) -> None:
        self.name, self.kind, self.label = "", OTHERS, ""
        self.seen = 0
        self.rss, self.cpu_ns, self.queued_ns = stat.rss, 0, 0
        #: None before its first round, and where it may not be read.
        self.shares: Shares | None = None
        self.asked = False


class ChildrenSampler:
    """Of each kind in `KINDS` and, with the empty key, of all, "children count", "children rss" (bytes) and "children cpu"
    (nanoseconds so far), of loader workers also "children queued" (nanoseconds so far, ready and without a core); now and then
    "children pss", and with the process itself "tree pss" and "tree shared memory" (bytes).

    Args:
        workers: gives the pids of loader workers that are known by other means than their name, and what to call them.
        root: where /proc is; "/" outside tests.
    """

    def __init__(self, workers: Callable[[], Mapping[int, str]] = dict, root: Path = Path("/")) -> None:
        self._workers = workers
        self._pid, self._root = os.getpid(), root
        self._executable = executable(self._pid, root)
        self._own_command = command(self._pid, root)
        self._children: dict[_Key, _Child] = {}
        self._said: set[str] = set()
        self._cpu_ns = dict.fromkeys(KINDS, 0)
        #: Of loader workers; None where the kernel does not say.
        self._queued_ns: int | None = 0
        self._most = dict.fromkeys(KINDS, 0)
        self._ever = self._zombies = 0
        self._due_ns = self._round_due_ns = self._round_spent_ns = self._round_ended_ns = 0
        self._round: list[_Key] = []
        self._round_rss = 0
        self._round_of: set[_Key] = set()
        self._own: Shares | None = None
        self._peak: dict[str, object] | None = None
        self._peak_pss = self._noted_pss = 0
        #: A note is due: what they hold has grown.
        self.news = False

    def sample(self) -> Sequence[Reading]:
        now = now_ns()
        if not self._children and not self._any():
            return ()
        readings: list[Reading] = []
        if now >= self._due_ns:
            spent = time.thread_time_ns()
            readings += self._look()
            self._due_ns = now + _LOOKS * (time.thread_time_ns() - spent)
        if self._children or self._round:
            readings += self._continue_round()
        return readings

    def note(self) -> tuple[str, dict[str, Any]]:
        """Who held what when they held most, and how many there were."""
        self.news = False
        body: dict[str, Any] = {"seen": self._ever, "most": {kind: most for kind, most in self._most.items() if most}}
        if self._zombies:
            body["zombies"] = self._zombies
        return CHILDREN, body if self._peak is None else body | {"peak": self._peak}

    def close(self) -> None:
        pass

    # Who is there.

    def _any(self) -> bool:
        """This process has any child, or it may have."""
        try:
            # Leaves who has ended to be waited for by the script.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False
        except OSError:
            return True
        return True

    def _look(self) -> list[Reading]:
        settled = boot_ns() - _SETTLED_NS
        there = descendants(self._pid, self._root)
        self._zombies = sum(stat.zombie for stat in there)
        living = {(stat.pid, stat.start): stat for stat in there if not stat.zombie and stat.began_ns <= settled}
        for gone in self._children.keys() - living.keys():
            del self._children[gone]
        workers = self._workers()
        for key, stat in living.items():
            child = self._children.get(key)
            if child is None:
                child = self._children[key] = _Child(stat)
                self._ever += 1
            self._describe(child, stat, workers)
            # One that was seen at work for the first time has spent all of it by now.
            self._cpu_ns[child.kind] += max(0, stat.cpu_ns - child.cpu_ns)
            child.rss, child.cpu_ns = stat.rss, stat.cpu_ns
            if child.kind == LOADERS and self._queued_ns is not None:
                self._queue(child, stat.pid)
        readings: list[Reading] = []
        before = bool(self._said)
        for kind in KINDS:
            mine = [child for child in self._children.values() if child.kind == kind]
            self._most[kind] = max(self._most[kind], len(mine))
            if mine or kind in self._said:
                readings.append(("children count", kind, len(mine)))
                readings.append(("children rss", kind, sum(child.rss for child in mine)))
                readings.append(("children cpu", kind, self._cpu_ns[kind]))
                if kind == LOADERS and self._queued_ns is not None:
                    readings.append(("children queued", kind, self._queued_ns))
                if not mine:
                    readings.append(("children pss", kind, 0))
            if mine:
                self._said.add(kind)
            else:
                self._said.discard(kind)
        if before or self._said:
            # In one row, for a process that is of another kind from now on would count twice, or not at all, in between.
            readings.append(("children count", "", len(self._children)))
            readings.append(("children rss", "", self._rss()))
            readings.append(("children cpu", "", sum(self._cpu_ns.values())))
            if not self._children:
                readings.append(("children pss", "", 0))
        return readings

    def _queue(self, child: _Child, pid: int) -> None:
        assert self._queued_ns is not None
        queued = queued_ns(pid, self._root)
        if queued is not None:
            self._queued_ns += max(0, queued - child.queued_ns)
            child.queued_ns = queued
        elif os.path.exists(self._root / "proc" / str(pid)):
            self._queued_ns = None

    def _describe(self, child: _Child, stat: Stat, workers: Mapping[int, str]) -> None:
        """What it is: again where it runs something else by now, and at the second look, for it may have just been forked."""
        child.seen += 1
        named = workers.get(stat.pid)
        if named is not None or stat.name == _WORKER:
            child.kind, child.label = LOADERS, named or child.label or "loader worker"
            child.name = stat.name
            return
        if child.name == stat.name and child.seen > 2:
            return
        child.name = stat.name
        path, words = executable(stat.pid, self._root), command(stat.pid, self._root)
        python = os.path.basename(path or (words[0] if words else stat.name)).startswith("python")
        if python or (path and path == self._executable):
            forked = words == self._own_command
            child.kind, child.label = PYTHON, _of_multiprocessing(stat.pid) or _python(words, forked)
        else:
            # Not its arguments: they may hold secrets.
            child.kind, child.label = OTHERS, os.path.basename(words[0]) if words else stat.name
        child.label = child.label[:_MOST_LABEL]

    # What they hold.

    def _continue_round(self) -> list[Reading]:
        began, spent = now_ns(), time.thread_time_ns()
        if not self._round:
            changed = self._children.keys() != self._round_of or self._rss() > _GROWN * self._round_rss
            due = self._round_ended_ns + max(0 if changed else _ROUND_NS, _ROUNDS * self._round_spent_ns)
            if began < due:
                return []
            self._round, self._round_of, self._round_rss = list(self._children), set(self._children), self._rss()
            self._own, self._round_spent_ns = shares(self._pid, self._root), 0
        while self._round and now_ns() - began < _ROUND_PART_NS:
            key = self._round.pop()
            child = self._children.get(key)
            if child is not None:
                child.shares, child.asked = shares(key[0], self._root), True
            if not self._round:
                # Those that have come meanwhile: with all that they share they would count too much.
                self._round = [key for key, child in self._children.items() if not child.asked]
        self._round_spent_ns += time.thread_time_ns() - spent
        if self._round:
            return []
        self._round_ended_ns = now_ns()
        return self._sums()

    def _rss(self) -> int:
        return sum(child.rss for child in self._children.values())

    def _sums(self) -> list[Reading]:
        """Those whose pages may not be read, another user's, count with all that they share."""
        read = [(child, child.rss if child.shares is None else child.shares.pss) for child in self._children.values()]
        held = {kind: sum(pss for child, pss in read if child.kind == kind) for kind in KINDS}
        readings: list[Reading] = [("children pss", kind, held[kind]) for kind in KINDS if kind in self._said]
        pss = sum(held.values())
        readings.append(("children pss", "", pss))
        if self._own is not None:
            readings.append(("tree pss", "", pss + self._own.pss))
            shmem = [each.shmem for each in (self._own, *(child.shares for child, _ in read)) if each is not None]
            known = [each for each in shmem if each is not None]
            if known:
                readings.append(("tree shared memory", "", sum(known)))
        if self._peak is None or pss > self._peak_pss:
            self._peak, self._peak_pss = self._who(pss), pss
        if self._peak_pss > _NEWS * self._noted_pss:
            self._noted_pss, self.news = self._peak_pss, True
        return readings

    def _who(self, pss: int) -> dict[str, object]:
        """Who they are now, those that hold most first."""
        held = [(child.rss if child.shares is None else child.shares.pss, key, child) for key, child in self._children.items()]
        held.sort(key=lambda each: (-each[0], each[1]))
        return {
            "time_ns": now_ns(),
            "pss_nbytes": pss,
            "rss_nbytes": self._rss(),
            "count": len(held),
            "unread": sum(child.shares is None for _, _, child in held),
            "who": [[key[0], child.kind, child.label, nbytes, child.rss] for nbytes, key, child in held[:_MOST_NAMED]],
        }


def _of_multiprocessing(pid: int) -> str:
    """The name by which this process's own `multiprocessing` knows it, such as "Process-3"; "" for none."""
    module: Any = sys.modules.get("multiprocessing.process")
    # Another thread may be starting or closing one just now.
    with suppress(RuntimeError, ValueError, AttributeError):
        for process in tuple(module._children):
            if process.pid == pid:
                return str(process.name)
    return ""


def _python(words: Sequence[str], forked: bool) -> str:
    """A Python process by its script or module. Not by its arguments: they may hold secrets."""
    if forked:
        return "a fork of this process"
    options = iter(words[1:])
    for word in options:
        if word in ("-X", "-W", "--check-hash-based-pycs"):
            next(options, "")
            continue
        if word == "-m":
            return f"python -m {next(options, '')}"
        if word == "-c":
            code = next(options, "")
            known = next((name for module, name in _OF_MULTIPROCESSING.items() if f"from {module} " in code), "")
            return known or ("a process of multiprocessing" if "--multiprocessing-fork" in words else "python -c")
        if not word.startswith("-"):
            return f"python {os.path.basename(word)}"
    return "python"
