"""Owns the interpreter a recorded script runs in: what the script finds is what plain python would show it, and a recorder.

`child` starts it. It imports nothing heavy before the script does, writes the trace's last words, and never changes
what the script prints, raises or returns to the shell.

Note: [As plain python]
    ``__main__``, ``sys.argv`` and ``sys.path[0]`` are set as the interpreter sets them, and stay so to the very end, so that
    pickled classes, exit handlers, threads and spawned processes find what they expect. An error leaves through the
    interpreter itself, which knows every rule of exit codes; only our own frames are cut from the traceback it prints.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import importlib.machinery
import io
import json
import mmap
import os
import pkgutil
import runpy
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from offload.errors import ZhooksError
from zprof.recording.recorder import Children, Level, Recorder, leave_inherited
from zprof.recording.stacks import hide
from zprof.rows import TraceError
from zprof.running.arrival import when_imported
from zprof.running.follow import MOST, Family, follow
from zprof.trace.children import CHILD, child_path, recorded_children

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Order", "TorchRecorder", "main", "record_child"]

#: Seconds ``os._exit`` waits for the trace to be ended; it may be called while a lock of ours is held.
_LAST_WORDS_S = 2.0
#: Bytes kept back so that a script which ran out of memory can still say so: mapped, never touched, so resident nowhere.
_LAST_WORDS_NBYTES = 16 << 20
_PR_SET_PDEATHSIG = 1
#: The folder of this package: whose code it holds is ours.
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Order:
    """What to record, and how; ``module`` says that the target is the name of a module, not a path.

    ``watcher`` is the process that started this one, whose end ends it; 0 for none. After ``hang_after_s`` without a row stacks
    are noted, and on the signal ``stacks_on`` printed; 0 and "" for never.
    """

    output: str
    target: str
    module: bool = False
    force: bool = False
    level: Level | Literal["auto"] = "auto"
    nvml: str = "auto"
    interval_s: float = 0.1
    children: Children | Literal["record"] = "memory"
    watcher: int = 0
    hang_after_s: float = 0.0
    stacks_on: str = ""
    ops_steps: str | None = None
    ops_stack: bool = False

    def arguments(self, command: Sequence[str]) -> list[str]:
        """The command line of `main`."""
        return [json.dumps(asdict(self)), *command]


class TorchRecorder(Recorder):
    """A recorder that may start before torch is loaded, and never loads it: what needs torch begins when it is there."""

    whole: ClassVar[bool] = True

    def _start_part(self, module: str) -> None:
        when_imported("torch", lambda: super(TorchRecorder, self)._start_part(module) if self.open else None)

    def _watch_steps(self) -> None:
        when_imported("torch", lambda: super(TorchRecorder, self)._watch_steps() if self.open else None)


class _Recording:
    """The recorder of this process, and how the script is about to end."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.reason, self.exit = "", 0
        self.undo: list[Callable[[], None]] = []
        self._kept_back = _kept_back()

    def close(self) -> None:
        while self.undo:
            self.undo.pop()()
        self.recorder.close(self.reason, self.exit)

    def ends_by(self, error: BaseException) -> None:
        """Take down why the script ends; what it printed as its error is the interpreter's business."""
        kept_back = 0 if self._kept_back is None else len(self._kept_back)
        if self._kept_back is not None:
            self._kept_back.close()
        from zprof.oom.deaths import death_of, write_death
        from zprof.oom.facts import failure_of, write

        self.reason, self.exit = type(error).__name__, 1
        if isinstance(error, SystemExit):
            self.exit = error.code if isinstance(error.code, int) else int(error.code is not None)
            self.reason = "SystemExit" if self.exit else ""
        failure = failure_of(error, kept_back) if self.exit else None
        death = death_of(error) if self.exit else None
        # The first write imports what encodes it; at exit that would make python forget an interrupt it is dying of.
        self.recorder.flush()
        if death is not None:
            write_death(self.recorder, death)
        if failure is not None:
            write(self.recorder, failure)


def _kept_back() -> mmap.mmap | None:
    try:
        return mmap.mmap(-1, _LAST_WORDS_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # Too little is left already; the script may need none.
        return None


#: Of this process; in a fork that has none of its own, its parent's, which is closed there.
_current: _Recording | None = None


def main() -> None:
    """Record ``sys.argv[2:]``'s script as ``sys.argv[1]``, an `Order`, says."""
    global _current
    # What called this is a program of one line, whose name is as that of any other.
    hide(sys._getframe(1).f_code)
    order = Order(**json.loads(sys.argv[1]))
    command = sys.argv[2:]
    # As the trace shall name the script: what to type after `zprof run`.
    sys.argv = ["-m"] * order.module + [order.target, *command]
    _die_with(order.watcher)
    try:
        recorder = TorchRecorder(
            order.output,
            level=order.level,
            interval_s=order.interval_s,
            nvml=order.nvml,
            force=order.force,
            children="off" if order.children == "off" else "memory",
            ops_steps=order.ops_steps,
            ops_stack=order.ops_stack,
        ).listen()
    except ZhooksError as error:
        _refuse(error)
    sys.argv = [order.target, *command]
    _current = recording = _Recording(recorder)
    # Registered first, so called last: what the script does at its own exit is recorded too.
    atexit.register(recording.close)
    if order.children == "record":
        recording.undo.append(follow(Family(asdict(order), os.path.abspath(order.output), os.getpid(), recorder.began_ns)))
    _watch_for_hangs(order, recorder)
    _close_before_exit()
    script = _module(order.target) if order.module else _script(order.target)
    try:
        script()
    except BaseException as error:
        # In a fork that came back here, its own.
        _ends_by(_current, error)
        _cut_frames()
        raise


def _watch_for_hangs(order: Order, recorder: Recorder, *, begun: bool = False) -> None:
    """What was asked for, before the script can set a handler of its own, which then takes the place of this one.

    Args:
        begun: the program runs already, and keeps a handler that it has set.
    """
    if order.hang_after_s:
        from zprof.running.silence import Silence

        family = order.children == "record"
        Silence(recorder, order.hang_after_s, _say, lambda: family and _works_elsewhere(recorder)).start()
    if order.stacks_on and not (begun and signal.getsignal(signal.Signals[order.stacks_on]) is not signal.SIG_DFL):
        import faulthandler

        # From C, in the signal's handler itself: also where the main thread hangs in C, or keeps the interpreter's lock.
        faulthandler.register(signal.Signals[order.stacks_on], all_threads=True)


def _works_elsewhere(recorder: Recorder) -> bool:
    """A process under this one is recorded, and lives: its own recording says what it does, and where it hangs."""
    from zprof.recording.processes import descendants
    from zprof.trace.reader import Trace

    living = {each.pid for each in descendants(os.getpid()) if not each.zombie}
    trace = Trace.growing(recorder.path)
    try:
        return any(child.pid in living for child in recorded_children(trace))
    finally:
        trace.close()


def _say(text: str) -> None:
    # Not through sys.stderr, which the script may have replaced, and whose lock the thread that hangs may hold.
    with suppress(OSError):
        os.write(2, f"{text}\n".encode("utf-8", "backslashreplace"))


def _ends_by(recording: _Recording, error: BaseException) -> None:
    try:
        recording.ends_by(error)
    except Exception as ours:
        with suppress(Warning):
            warnings.warn(f"zprof: the trace lacks why the script ended: {type(ours).__name__}: {ours}", stacklevel=1)


def record_child(family: Family, how: str, why: str) -> None:
    """Begin the recording of this process, which a recorded script has started, and which trains from now on.

    Raises:
        ZhooksError: no trace can be made, or there are as many as there may be.
    """
    global _current
    leave_inherited()
    order = Order(**family.order)
    recorder, number = _child_recorder(order, family.output)
    _current = recording = _Recording(recorder)
    about = {"root_pid": family.pid, "root_ns": family.mono_ns, "parent_pid": os.getppid()}
    recorder.note(CHILD, about | {"number": number, "how": how, "why": why})

    def end() -> None:
        # multiprocessing calls it while what ends the process is on its way.
        error = sys.exc_info()[1]
        if error is not None and recorder.open and not recording.reason:
            _ends_by(recording, error)
        recording.close()

    atexit.register(recording.close)
    if "multiprocessing.util" in sys.modules:
        from multiprocessing import util

        # The last of all; its forks end without what is registered to be called at exit.
        util.Finalize(None, end, exitpriority=-100)
    _watch_for_hangs(order, recorder, begun=True)
    _close_before_exit()


def _child_recorder(order: Order, output: str) -> tuple[Recorder, int]:
    for number in range(1, MOST + 1):
        path = child_path(output, number)
        if os.path.lexists(path):
            continue
        nvml = "off" if order.nvml == "off" else "auto"
        try:
            recorder = TorchRecorder(
                path,
                level=order.level,
                interval_s=order.interval_s,
                nvml=nvml,
                ops_steps=order.ops_steps,
                ops_stack=order.ops_stack,
            )
            return recorder.listen(), number
        except TraceError:
            # Another child may have been quicker.
            if not os.path.lexists(path):
                raise
    found = f"expected fewer than {MOST} traces of children, found as many; delete old ones"
    raise TraceError(f"{child_path(output, MOST)}: {found}")


def _die_with(watcher: int) -> None:
    """End as killed when the watching process is killed: to its caller the two are one."""
    if not watcher:
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != watcher:
        os.kill(os.getpid(), signal.SIGKILL)


def _warn_shadowed(folder: str) -> None:
    """Say that a script's own module of our packages' names is not the one it will import."""
    for name in ("offload", "zprof"):
        theirs = [path for path in (f"{folder}/{name}.py", f"{folder}/{name}/__init__.py") if os.path.exists(path)]
        here = getattr(sys.modules.get(name), "__file__", None)
        if theirs and here is not None and not os.path.samefile(theirs[0], here):
            sys.stderr.write(f"zprof: {theirs[0]}: `import {name}` gives zhooks' own under zprof run; rename yours\n")


def _refuse(error: ZhooksError) -> NoReturn:
    from zprof.problem import problem_of

    problem = problem_of(error)
    problem.show()
    raise SystemExit(problem.exit_code)


def _close_before_exit() -> None:
    """``os._exit`` ends the trace first; in a forked child without one there is nothing to end."""
    global _exit_replaced
    if _exit_replaced:
        return
    _exit_replaced = True
    really = os._exit

    def leave(status: int) -> NoReturn:
        recording = _current
        if recording is not None and recording.recorder.open:
            recording.reason, recording.exit = recording.reason or "os._exit", status
            ending = threading.Thread(target=recording.close, daemon=True)
            with suppress(RuntimeError):  # no memory for a thread; the script's own ending matters more
                ending.start()
                ending.join(_LAST_WORDS_S)
        really(status)

    os._exit = leave


_exit_replaced = False


# What plain python does.


def _script(path: str) -> Callable[[], object]:
    """``python path``: a source or compiled file, or a folder or zip archive with a ``__main__``."""
    held = _fresh_main()
    if pkgutil.get_importer(path) is not None:
        sys.path.insert(0, os.path.abspath(path))
        return lambda: _as_main("__main__", False)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        _warn_shadowed(sys.path[0])
    whole = os.path.abspath(path)
    held["__file__"], held["__cached__"] = whole, None
    compiled = path.endswith(".pyc")
    loader = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    held["__loader__"] = loader("__main__", whole)

    def run() -> None:
        with io.open_code(whole) as file:
            code = pkgutil.read_code(file)
        if code is None:
            with io.open_code(whole) as file:
                code = compile(file.read(), whole, "exec", dont_inherit=True)
        exec(code, held)

    return run


def _module(name: str) -> Callable[[], object]:
    """``python -m name``."""
    _fresh_main()
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
        _warn_shadowed(sys.path[0])
    sys.argv[0] = "-m"
    return lambda: _as_main(name, True)


def _as_main(name: str, alter_argv: bool) -> object:
    # The very function the interpreter calls for -m.
    return runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _fresh_main() -> dict[str, Any]:
    """A new ``__main__``; its names."""
    module = types.ModuleType("__main__")
    held = module.__dict__
    held["__builtins__"], held["__annotations__"] = builtins, {}
    sys.modules["__main__"] = module
    return held


def _cut_frames() -> None:
    """From now on an uncaught error, and those that led to it, are shown without the frames that are ours."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        waiting, seen = [error], set[int]()
        while waiting:
            each = waiting.pop()
            if id(each) not in seen:
                seen.add(id(each))
                each.__traceback__ = _theirs(each.__traceback__)
                more = (each.__cause__, each.__context__, *(each.exceptions if isinstance(each, BaseExceptionGroup) else ()))
                waiting += [led for led in more if led is not None]
        shown(kind, error, error.__traceback__)

    sys.excepthook = hook


def _theirs(trace: types.TracebackType | None) -> types.TracebackType | None:
    """What follows our call of the script, without the frames of what listens to torch while the script runs."""
    at = trace
    while at is not None:
        if at.tb_frame.f_code is main.__code__:
            trace = at.tb_next
        at = at.tb_next
    trace = _next_of_theirs(trace)
    at = trace
    while at is not None:
        at.tb_next = _next_of_theirs(at.tb_next)
        at = at.tb_next
    return trace


def _next_of_theirs(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OURS):
        trace = trace.tb_next
    return trace
