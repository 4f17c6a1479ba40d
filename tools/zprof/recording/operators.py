"""Owns the level "ops": torch.profiler's events of chosen steps, joined to modules and passes, as notes of the trace.

The recorder opens it after all its other parts. It decides when a session is open and never looks into one; it keeps out of the
way of a script that uses torch.profiler itself; and a mistake of its own ends it with a note, never the run.

Note: [Steps, forwards, windows]
    A window is a run of steps in which torch.profiler records. Steps are counted at their ends: of several optimizers by the
    last of those that step most often. Until one has stepped, outermost forwards that keep no graph count in their stead, and
    so do all where no optimizer exists. A window begins and ends where one is counted, on the thread that ran it; where that
    takes too long, a thread of ours ends it.

Note: [Storages are not followed in a window]
    Storages are followed by a dispatch mode, which makes torch call each operation twice: both would be counted, with the time
    of our Python between them, and a GPU that waits for the host would seem to wait longer. So the mode is taken off while a
    window is open, and what lives on is met afterwards. It is put on only when a first forward keeps a graph or an optimizer
    steps: inference_mode restores what it found, so that no mode could be taken off inside it.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import profiler as torchs_profiler
from torch.nn.modules import module as registry
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zprof.clock import now_ns
from zprof.recording.hooks import end_in_children
from zprof.recording.joining import Passage, joined
from zprof.recording.kineto import Session, is_starting
from zprof.recording.modules import Places, ignore_warning_of_compile
from zprof.recording.schedule import LONGEST_S, MOST_RSS_NBYTES
from zprof.recording.stacks import Stacks
from zprof.trace.operators import EVENTS, MOST_EVENTS, PASSES, WINDOW, bodies

if TYPE_CHECKING:
    from zprof.recording.computing import Computing
    from zprof.recording.recorder import Recorder
    from zprof.recording.schedule import Schedule
    from zprof.recording.tracker import Tracker

__all__ = ["Operators", "open_part"]

STEP, FORWARD = "step", "forward"
_FORWARDS_BEFORE_A_LOOK = 3
_BEAT_S = 0.5
_PAGE = os.sysconf("SC_PAGE_SIZE")
_SCRIPTS_OWN = "the script uses torch.profiler itself, and a process can have one"

_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_task: Callable[[], int] = torch._C._current_graph_task_id


def open_part(recorder: Recorder) -> Operators:
    """The operators of a recorder, not yet started."""
    return Operators(recorder.schedule, recorder.note, recorder.tracker, recorder.computing, recorder.thread_number)


class _Depth(threading.local):
    def __init__(self) -> None:
        self.forwards = 0


class _Window:
    """One that is open.

    Attributes:
        log: what our hooks heard, as they heard it: (module or optimizer, begins, time, thread, sequence, how it runs).
        counted: the unit its end is counted in, "" for the whole recording. unit: that of its bounds.
        bounds: when it began, and when each counted step ended.
    """

    def __init__(self, number: int, session: Session, counted: str, first: int, end: int, followed: bool) -> None:
        self.number, self.session, self.counted, self.unit = number, session, counted, counted
        self.first, self.end, self.followed = first, end, followed
        self.log: list[tuple[object, bool, int, int, int, int]] = []
        self.natives: dict[int, int] = {}
        self.bounds: list[int] = []
        self.asked_ns = now_ns()
        self.over = threading.Event()


class Operators:
    """Opens windows by ``schedule`` and writes what was seen in them: a `Part` of the recorder.

    Args:
        note: takes a note of the recording.
        tracker: follows storages, outside of windows; None where nobody does. computing: counts what steps compute.
        thread_number: the number that a thread has in rows, -1 where it has put none.
    """

    def __init__(
        self,
        schedule: Schedule,
        note: Callable[[str, Mapping[str, object]], None],
        tracker: Tracker | None = None,
        computing: Computing | None = None,
        thread_number: Callable[[int], int] = lambda ident: -1,
    ) -> None:
        self._schedule, self._note, self._thread_number = schedule, note, thread_number
        self._tracker, self._computing = tracker, computing
        self._places = tracker.places if tracker is not None else Places(lambda root: None, lambda error: None)
        self._stacks = Stacks() if schedule.stack else None
        self._left = {STEP: list(schedule.ranges), FORWARD: list(schedule.ranges)}
        #: No window begins any more; storages are not followed any more; they have been.
        self._barred = self._left_alone = self._followed = False
        self._main = 0
        self._window: _Window | None = None
        self._number = self._events = 0
        self._prepared: Session | None = None
        self._why = ""
        self._changing = threading.RLock()
        self._depth = _Depth()
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._steps = self._forwards = self._with_graph = 0
        self._trains = self._no_optimizer = False
        self._undo: list[Callable[[], None]] = []
        self._resume_due = False
        self._pid = os.getpid()

    # Its life.

    def start(self) -> None:
        """Wait for the first window, or open it."""
        # Names of torch's that a window takes, now: what lacks is said when the recording begins.
        Session()
        self._undo.append(_make_way(self._script_profiles))
        end_in_children(self._end_in_child)
        self._undo.append(register_optimizer_step_pre_hook(self._step_begins).remove)
        self._undo.append(register_optimizer_step_post_hook(self._step_ended).remove)
        # They stay to the end, see `Places.silence`.
        self._undo.append(ignore_warning_of_compile())
        self._undo.append(registry.register_module_forward_pre_hook(self._forward_begins).remove)
        self._undo.append(registry.register_module_forward_hook(self._forward_ended, always_call=True).remove)
        self._note(WINDOW, {"steps": str(self._schedule)})
        if self._schedule.whole:
            self._open("", 0, 1 << 62)

    def close(self) -> None:
        """End the window that is open, and hear nothing more."""
        with self._changing:
            # Nothing is made any more that one could follow.
            self._left_alone = True
            self._close_window("the recording ended")
            self._unprepare()
        self._unhook()
        if not self._number:
            self._skip(self._why or self._nothing())
        elif self._why and self._left[STEP if self._trains else FORWARD]:
            self._skip(self._why)

    def _unhook(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _nothing(self) -> str:
        seen = [(self._steps, "optimizer steps"), (self._forwards, "forwards")]
        found = [f"{count} {what}" for count, what in seen if count]
        said = " and ".join(found) or "neither an optimizer step nor a module's forward"
        return f"{said} were seen, and steps {self._schedule} were to be recorded; choose others, or all, with --ops-steps"

    def _skip(self, why: str) -> None:
        self._note(WINDOW, {"why": why})

    def _fail(self, error: Exception) -> None:
        """Nothing more is recorded."""
        with suppress(Exception):
            self._skip(f"{type(error).__name__}: {error}")
        window, self._window = self._window, None
        self._barred = True
        if window is not None:
            window.over.set()
            with suppress(Exception):
                window.session.stop()
        self._follow_storages()
        if self._computing is not None:
            self._computing.step_aside(False)

    def _follow_storages(self) -> None:
        """Again, or when that is possible next."""
        self._resume_due = not self._resume()

    def _resume(self, within: nn.Module | None = None, caller: Any = None) -> bool:
        if self._tracker is None or self._left_alone:
            return True
        if not self._tracker.resume(within, caller):
            return False
        if not self._followed:
            self._followed = True
            self._note(WINDOW, {"followed_from_ns": now_ns()})
        return True

    def _end_in_child(self) -> None:
        window, self._window = self._window, None
        self._barred, self._prepared = True, None
        with suppress(Exception):
            self._unhook()
            if window is not None:
                window.session.forget()

    # What is heard: every module's forward, and steps.

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        window, depth = self._window, self._depth
        if window is not None:
            ident = threading.get_ident()
            if ident not in window.natives:
                window.natives[ident] = threading.get_native_id()
            how = (_task() >= 0) << 2 | module.training << 1 | torch.is_grad_enabled()
            window.log.append((module, True, now_ns(), ident, _next_number(), how))
        depth.forwards += 1
        if depth.forwards == 1 and not self._trains:
            try:
                self._outermost_begins(module, sys._getframe(1))
            except Exception as error:
                self._fail(error)

    def _forward_ended(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        window, depth = self._window, self._depth
        if window is not None:
            window.log.append((module, False, now_ns(), threading.get_ident(), _next_number(), 0))
        depth.forwards = max(depth.forwards - 1, 0)
        if not depth.forwards and (self._resume_due or not self._trains):
            try:
                self._outermost_ended()
            except Exception as error:
                self._fail(error)

    def _outermost_begins(self, module: nn.Module, caller: Any) -> None:
        """No optimizer has stepped yet."""
        self._main = self._main or threading.get_ident()
        if not self._on_main():
            return
        graph = torch.is_grad_enabled()
        with self._changing:
            if graph and self._window is not None and self._window.counted == FORWARD and not self._no_optimizer:
                # An evaluation before the training is over.
                self._close_window("a forward that keeps a graph began")
            unit = STEP if graph else FORWARD
            if self._window is None and self._left[unit] and self._left[unit][0][0] == 0:
                self._open(unit, 0, self._left[unit][0][1])
            elif self._window is None and graph:
                self._resume(module, caller)

    def _on_main(self) -> bool:
        """Not in a child, a replica's thread, or a backward."""
        return os.getpid() == self._pid and threading.get_ident() == self._main and _task() < 0 and not _captured()

    def _outermost_ended(self) -> None:
        if not self._on_main():
            return
        with self._changing:
            if self._resume_due and self._window is None:
                self._follow_storages()
            if self._trains:
                return
            if torch.is_grad_enabled() and not self._no_optimizer:
                self._with_graph += 1
                if self._with_graph != _FORWARDS_BEFORE_A_LOOK:
                    return
                self._no_optimizer = not any(issubclass(type(each), Optimizer) for each in gc.get_objects())
                self._forwards += self._with_graph - 1 if self._no_optimizer else 0
                if not self._no_optimizer:
                    return
            self._forwards += 1
            self._counted(FORWARD, self._forwards)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid or _captured():
            return
        window = self._window
        if window is not None:
            ident = threading.get_ident()
            window.natives.setdefault(ident, threading.get_native_id())
            window.log.append((optimizer, True, now_ns(), ident, _next_number(), 0))

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._pid or _captured():
            return
        window = self._window
        if window is not None:
            window.log.append((optimizer, False, now_ns(), threading.get_ident(), _next_number(), 0))
        try:
            self._step(optimizer)
        except Exception as error:
            self._fail(error)

    def _step(self, optimizer: Any) -> None:
        with self._changing:
            if not self._trains:
                self._trains = True
                if self._window is not None and self._window.counted == FORWARD:
                    self._close_window("an optimizer stepped")
            count = self._stepped[optimizer] = self._stepped.get(optimizer, 0) + 1
            # One that has not stepped yet this time comes last, and a step of it is one of the loop.
            if count > self._steps and not any(each == count - 1 for each in self._stepped.values()):
                self._steps = count
                self._counted(STEP, count)
            if self._window is None:
                self._follow_storages()

    def _counted(self, unit: str, number: int) -> None:
        """So many steps have ended, or forwards."""
        window = self._window
        if window is not None:
            if not window.counted and unit != window.unit:
                # The whole recording: steps count rather than the forwards before the first.
                window.unit, window.bounds = unit, window.bounds[:1]
            if unit == window.unit:
                window.bounds.append(now_ns())
            if window.counted != unit or number < window.end:
                return
            self._close_window("")
        left = self._left[unit]
        while left and left[0][1] <= number:
            left.pop(0)
        if not left:
            return
        begin, end = left[0]
        if begin <= number:
            self._open(unit, number, end)
        elif begin == number + 1 and torch.cuda.is_initialized() and not self._busy():
            # The first time CUPTI is started it takes seconds.
            self._prepared = self._prepared or self._session()
            self._prepared.prepare()

    # Windows.

    def _session(self) -> Session:
        return Session(None if self._stacks is None else self._stacks.user_line)

    def _busy(self) -> bool:
        if torchs_profiler._is_profiler_enabled:
            self._script_profiles()
        return self._barred or self._events >= MOST_EVENTS

    def _open(self, unit: str, first: int, end: int) -> None:
        if self._busy():
            return
        if self._tracker is not None and not self._tracker.pause():
            self._why = f"a {unit} ended inside of inference_mode, where the tracking of storages cannot be paused"
            return
        if self._computing is not None:
            self._computing.step_aside(True)
        session = self._prepared or self._session()
        prepared, self._prepared = self._prepared is not None, None
        followed = self._tracker is not None
        window = _Window(self._number, session, unit, first, end, followed)
        if not prepared:
            session.prepare()
        session.start()
        window.bounds.append(now_ns())
        if unit:
            self._left[unit].pop(0)
        self._number += 1
        self._why = ""
        self._window = window
        begun = {"window": window.number, "begin_ns": window.bounds[0], "counted": unit, "first": first, "followed": followed}
        self._note(WINDOW, begun)
        threading.Thread(target=self._watch, args=(window,), name="zprof-operators", daemon=True).start()

    def _unprepare(self) -> None:
        """torch.profiler goes back only by going through."""
        session, self._prepared = self._prepared, None
        if session is not None:
            with suppress(Exception):
                session.start()
                session.stop()

    def _watch(self, window: _Window) -> None:
        """End it where it grows too long or too large, whatever the script does."""
        grown = _rss_nbytes() + MOST_RSS_NBYTES
        for _ in range(round(LONGEST_S / _BEAT_S)):
            if window.over.wait(_BEAT_S):
                return
            if _rss_nbytes() > grown:
                why = f"the process grew by over {MOST_RSS_NBYTES >> 30} GiB"
                break
        else:
            why = f"{LONGEST_S:.0f} s had passed"
        with self._changing:
            if self._window is window:
                try:
                    self._close_window(why)
                except Exception as error:
                    self._fail(error)

    def _script_profiles(self) -> None:
        """The script starts torch.profiler: it has it for itself from now on."""
        with self._changing:
            if not self._barred:
                self._why, self._barred = _SCRIPTS_OWN, True
                # What follows storages, and what counts FLOPs, would have it count each operation twice.
                self._left_alone = self._tracker is None or self._tracker.pause()
                if self._computing is not None and self._left_alone:
                    self._computing.step_aside(True)
                try:
                    self._close_window(_SCRIPTS_OWN)
                except Exception as error:
                    self._fail(error)
                self._unprepare()
                if self._left_alone and self._tracker is not None:
                    self._note("storages", {"why": "the script used torch.profiler"})

    def _close_window(self, why: str) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        window.over.set()
        asked_ns = now_ns()
        window.session.stop()
        seen = window.session.seen()
        passages = self._passages(window)
        events, places, left_out = joined(seen, passages, MOST_EVENTS - self._events)
        self._events += len(events)
        facts: dict[str, object] = {
            "window": window.number,
            "begin_ns": window.bounds[0],
            "end_ns": seen.end_ns or asked_ns,
            "counted": window.unit if len(window.bounds) > 1 else "",
            "first": window.first,
            "bounds": window.bounds[: 1 << 16],
            "why": why if seen.name else (why or "torch.profiler saw nothing: another session took its place"),
            "events": len(events),
            "left_out": left_out,
            "stack": self._schedule.stack,
            "followed": window.followed,
            "error_ns": seen.error_ns,
            "tracks": self._tracks(places, window),
            "activities": sorted(activity.name for activity in window.session.activities),
        }
        for body in bodies(events, window.number):
            self._note(EVENTS, body)
        if self._computing is not None and not self._left_alone:
            self._computing.step_aside(False)
        self._follow_storages()
        # All that took place of ours: readers leave these steps out of what steps take.
        self._note(WINDOW, facts | {"pauses": [[window.asked_ns, window.bounds[0]], [asked_ns, now_ns()]]})

    def _passages(self, window: _Window) -> list[Passage]:
        """The log with names: modules are named as storages' are."""
        found = []
        open_of: dict[int, list[tuple[int, str]]] = {}
        for what, begins, time_ns, ident, sequence, how in window.log:
            lane, stack = window.natives.get(ident, -1), open_of.setdefault(ident, [])
            if isinstance(what, nn.Module):
                if begins:
                    path = self._places.path_in(what, stack[-1][1] if stack else None)
                    stack.append((id(what), path))
                else:
                    at = next((at for at in range(len(stack) - 1, -1, -1) if stack[at][0] == id(what)), None)
                    if at is None:
                        continue
                    path = stack[at][1]
                    del stack[at:]
                again, trains, graph = how & 4, how & 2, how & 1
                doing = "recompute" if again else "forward" if trains or graph else "evaluation"
            else:
                path, doing = "", "step"
            found.append(Passage(time_ns, lane, sequence, path, PASSES.index(doing) if begins else -1))
        return found

    def _tracks(self, places: Sequence[tuple[int, int]], window: _Window) -> list[list[object]]:
        idents = {native: ident for ident, native in window.natives.items()}
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        kind = "xpu" if "XPU" in {activity.name for activity in window.session.activities} else "cuda"
        found: list[list[object]] = []
        for device, lane in places:
            if device >= 0:
                found.append(["stream", f"{kind}:{device}", lane])
            else:
                number = self._thread_number(idents[lane]) if lane in idents else -1
                found.append(["thread", names.get(lane) or _thread_name(lane), number])
        return found


def _captured() -> bool:
    """A CUDA graph is being captured: what is called for is no step, and to wait for a device would end the capture."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _thread_name(native: int) -> str:
    try:
        return Path(f"/proc/self/task/{native}/comm").read_text().strip() or f"thread {native}"
    except (OSError, UnicodeDecodeError):
        return f"thread {native}"


def _rss_nbytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _make_way(wanted: Callable[[], None]) -> Callable[[], None]:
    """Have ``wanted`` called before the script starts torch.profiler: a second session would end the first one's, unheard.

    Returns what undoes it. ``wanted`` is a method; only weakly held.
    """
    held = weakref.WeakMethod(wanted)
    originals = {name: getattr(torchs_profiler, name) for name in ("_prepare_profiler", "_enable_profiler")}
    replaced: dict[str, Any] = {}

    def in_front_of(original: Callable[..., Any]) -> Callable[..., Any]:
        def makes_way(*args: Any, **kwargs: Any) -> Any:
            make_way = held()
            if make_way is not None and not is_starting():
                make_way()
            return original(*args, **kwargs)

        return makes_way

    for name, original in originals.items():
        replaced[name] = in_front_of(original)
        setattr(torchs_profiler, name, replaced[name])

    def undo() -> None:
        for name, original in originals.items():
            if getattr(torchs_profiler, name) is replaced[name]:
                setattr(torchs_profiler, name, original)

    return undo
