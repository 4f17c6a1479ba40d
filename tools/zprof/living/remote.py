"""Owns the way into a process of Python 3.14 or newer by `sys.remote_exec`: what can be asked there, and what is left of it.

`stacks` falls back on it, and ``zprof attach --record`` begins a recording by it. It hands over nothing but `inside`, waits for
the answer only so long, and takes back what was not begun.

Note: [What is left]
    A request waits in the process until its main thread comes to a line of Python; nothing can take it away. Where the answer
    does not come in time, the file that it names is made empty, so that nothing happens whenever it is read. A recording takes
    its hooks out at its end; modules that it imported stay imported.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.errors import CapabilityError, ZhooksError
from offload.regular_files import read_regular
from offload.text import one_line
from zprof.living import inside
from zprof.living.processes import Process, found, refusal, version_of
from zprof.living.stacks import Frame, Thread

__all__ = ["begin_recording", "end_recording", "remote_stacks", "why_not"]

#: The first Python that has it.
FIRST = (3, 14)
ANSWER_S = 5.0
#: A recording imports zprof and what it needs there.
BEGIN_S = 60.0
_LOOK_S = 0.02
_MOST_NBYTES = 16 << 20
_MOST_THREADS, _MOST_TEXT = 1024, 400


def why_not(process: Process) -> str:
    """Why nothing can be run inside ``process`` from here, in a few words; "" where it can."""
    theirs, mine = version_of(process.pid), sys.version_info[:2]
    if theirs is None:
        return "its version of Python cannot be determined"
    if theirs < FIRST:
        return f"it runs Python {theirs[0]}.{theirs[1]}, and sys.remote_exec needs 3.14"
    if theirs != mine:
        versions = f"Python {theirs[0]}.{theirs[1]} and zprof {mine[0]}.{mine[1]}"
        return f"it runs {versions}: sys.remote_exec needs the same on both sides"
    if _namespace(process.pid) != _namespace(os.getpid()):
        return "it is in another container, with other files: run zprof inside it"
    return ""


def remote_stacks(process: Process) -> list[Thread]:
    """Every thread, as the process itself says.

    Raises:
        ZhooksError: it does not answer, or is gone.  CapabilityError: it may not be asked.
    """
    said = _ask(process, "stacks", (), ANSWER_S)
    return [
        Thread(
            _text(each["name"]),
            int(each["number"]),
            tuple(Frame(_text(file), _text(function), int(line)) for file, function, line in each["frames"]),
        )
        for each in said["threads"][:_MOST_THREADS]
    ]


def begin_recording(process: Process, path: Path, *, level: str, seconds: float, force: bool) -> dict[str, Any]:
    """Have the process record itself into ``path``; what it answers: its level, and what was imported for it.

    Raises:
        ZhooksError: it does not answer, or cannot.  CapabilityError: it may not be asked.
    """
    return _ask(process, "begin", (str(path), level, seconds, force), BEGIN_S)


def end_recording(process: Process, path: Path) -> None:
    """Have it end that recording now.

    Raises:
        ZhooksError: as above; it ends by itself when its time is over.
    """
    _ask(process, "end", (str(path),), ANSWER_S)


def _ask(process: Process, name: str, words: tuple[object, ...], seconds: float) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="zprof-"))
    script, reply = folder / "ask.py", folder / "reply.json"
    call = f"{_text_of_inside()}\n__zprof__ = True\n{name}({', '.join(map(repr, (str(reply), *words)))})\n"
    asked = False
    try:
        script.write_text(call, encoding="utf-8")
        for path in (folder, script):
            os.chmod(path, 0o700 if path is folder else 0o600)
            if os.geteuid() == 0:
                # The process reads it by its own rights.
                os.chown(path, process.user, -1)
        _exec(process, script)
        asked = True
        if not _there(reply, process, seconds):
            raise ZhooksError(_unanswered(process, seconds, script))
        said = json.loads(read_regular(reply, _MOST_NBYTES))
    except (OSError, ValueError) as error:
        raise ZhooksError(f"pid {process.pid}: cannot be asked: {getattr(error, 'strerror', None) or error}") from None
    else:
        asked = False
    finally:
        if asked:
            script.write_bytes(b"")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if not isinstance(said, dict) or said.get("pid") not in (process.pid, process.inner):
        raise ZhooksError(f"pid {process.pid}: expected its own answer, found another's")
    if "problem" in said:
        raise ZhooksError(f"pid {process.pid}: the request failed there: {_text(said['problem'])}")
    return said


def _exec(process: Process, script: Path) -> None:
    run: Callable[[int, str], None] = getattr(sys, "remote_exec")  # noqa: B009  # of newer Pythons than mypy checks for
    try:
        run(process.pid, str(script))
    except PermissionError:
        raise refusal(process) from None
    except RuntimeError as error:
        chain: BaseException | None = error
        while chain is not None:
            if isinstance(chain, PermissionError):
                raise refusal(process) from None
            chain = chain.__cause__ or chain.__context__
        raise CapabilityError(
            f"pid {process.pid}: expected a Python that can be asked, found: {_text(error)}; it may have been started with "
            "PYTHON_DISABLE_REMOTE_DEBUG"
        ) from None


def _there(reply: Path, process: Process, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not reply.exists():
        now = found(process.pid)
        if now is None or not now.alive or now.began_s != process.began_s:
            raise ZhooksError(f"pid {process.pid}: expected a running process, found that it has just ended")
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def _unanswered(process: Process, seconds: float, script: Path) -> str:
    return (
        f"pid {process.pid}: expected an answer within {seconds:.0f} s, found none: its main thread is in C code, which only "
        f"py-spy sees (pip install 'zhooks[attach]'); the request stays pending, and will read {script}, which is empty now"
    )


def _text_of_inside() -> str:
    assert inside.__file__ is not None
    return Path(inside.__file__).read_text(encoding="utf-8")


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _text(value: object) -> str:
    return one_line(str(value))[:_MOST_TEXT]
