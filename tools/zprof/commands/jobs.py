"""Owns jobs: what is trained, named on a command line as ``module:function`` or ``file.py:function``.

The commands that simulate load one: the function returns ``(build, step)`` as ``zhooks.simulate`` takes them, or the module has
both by these names.  It never calls them itself, and an error of theirs becomes one line that names theirs.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from offload.errors import ZhooksError
from offload.regular_files import open_regular
from offload.text import counted
from zprof.problem import Misuse, Problem

if TYPE_CHECKING:
    from offload.hardware import Hardware

__all__ = ["HELP", "Job", "load_job", "one_node"]

#: What a command's help says of its argument.
HELP = """JOB is module:function or file.py:function; the function returns (build, step) as zhooks.simulate takes them. Without
:function, the module's own build and step are used."""
_EXPECTED = "expected module:function or file.py:function, where the function returns (build, step)"
#: Longest message of an error that is repeated.
_MOST = 400


@dataclass(frozen=True, slots=True)
class Job:
    """What ``zhooks.simulate`` is given.

    Attributes:
        name: as it was written on the command line.
        build, step: the job's own, with its errors as a `Problem` that says where.
    """

    name: str
    build: Callable[[], Any]
    step: Callable[..., object]


def load_job(name: str) -> Job:
    """The job of that name.

    Raises:
        Misuse: there is no such module, file or function, or it does not give two functions.
        Problem: its code raised.
    """
    place, _, function = name.partition(":") if not name.endswith(".py") else (name, "", "")
    if not place or (":" in name and not function):
        raise Misuse(f"{name}: {_EXPECTED}")
    is_file = place.endswith(".py") or os.sep in place
    module = _file(place) if is_file else _module(place)
    if not function:
        build, step = (getattr(module, each, None) for each in ("build", "step"))
        if not callable(build) or not callable(step):
            raise Misuse(f"{name}: expected functions build and step in it, or {place}:function, found neither pair")
        return Job(name, _named(build, f"build of {name}"), _named(step, f"step of {name}"))
    given = getattr(module, function, None)
    if given is None:
        near = difflib.get_close_matches(function, [each for each in vars(module) if callable(vars(module)[each])], n=1)
        raise Misuse(
            f"{name}: expected a function {function} in {place}, found none{f'; did you mean {near[0]}?' if near else ''}"
        )
    if not callable(given):
        raise Misuse(f"{name}: expected a function, found {type(given).__name__}")
    with _errors_of(name):
        pair = given()
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(callable, pair)):
        raise Misuse(f"{name}: expected that it returns (build, step), two functions, found {_said(pair)}")
    return Job(name, _named(pair[0], f"build of {name}"), _named(pair[1], f"step of {name}"))


def _said(found: object) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(type(each).__name__ for each in found)})"
    return type(found).__name__


def one_node(profile: Hardware, options: str) -> str:
    """Why a job is on so many devices where nothing was said of it, and which ``options`` take another number."""
    return f"one node of {profile.name} has {counted(profile.device.count, 'device')}; {options} takes another number"


# Modules and files.


def _module(name: str) -> ModuleType:
    _on_path(Path.cwd())
    top = name.partition(".")[0]
    known = top in sys.modules or importlib.machinery.PathFinder.find_spec(top, sys.path) is not None
    if not known or not all(each.isidentifier() for each in name.split(".")):
        near = "; a file is named by its path, with .py" if Path(f"{name}.py").is_file() else ""
        raise Misuse(f"{name}: expected a module, found none of that name here or installed{near}")
    with _errors_of(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                raise Misuse(f"{name}: expected a module, found none named {error.name}") from None
            raise


def _file(name: str) -> ModuleType:
    path = Path(name)
    try:
        os.close(open_regular(path))
    except (OSError, ValueError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise Misuse(f"{name}: expected a file of Python, found {why}") from None
    # As python has it for a script.
    _on_path(path.resolve().parent)
    # A name that no module has: the file's own may be that of a library.
    spec = importlib.util.spec_from_file_location("__job__", path.resolve())
    if spec is None or spec.loader is None:
        raise Misuse(f"{name}: expected a file of Python, whose name ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _errors_of(name):
        spec.loader.exec_module(module)
    return module


def _on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


# Errors of the job's code.


def _named(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _errors_of(what, function):
            return function(*args, **kwargs)

    return call


@contextmanager
def _errors_of(what: str, function: object = None) -> Iterator[None]:
    """An error of the job's, or an end of the process, as one line; ours say what they are themselves.

    Raises:
        Problem: what it raised, with its line.
    """
    try:
        yield
    except (Problem, ZhooksError):
        raise
    except SystemExit as error:
        why = f"ended the process (SystemExit: {error.code}); a job returns"
        raise Problem(f"{_where(error, function)}: {what} {why}") from error
    except Exception as error:
        words = " ".join(str(error).split())
        words = words if len(words) <= _MOST else f"{words[:_MOST]} ..."
        why = f"{type(error).__name__}{f': {words}' if words else ''}"
        raise Problem(f"{_where(error, function)}: {what} raised {why}") from error


def _where(error: BaseException, function: object) -> str:
    """The last line of the job's own that an error came through; of a function that could not be called, its first."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if not frame.filename.startswith((*_libraries(), "<frozen"))]
    last = (own or frames)[-1:]
    if last:
        return f"{last[0].filename}:{last[0].lineno}"
    code = getattr(function, "__code__", None)
    return "?" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _libraries() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    ours = [getattr(sys.modules.get(name), "__file__", None) for name in ("zhooks", "offload", "zprof")]
    folders = [paths[each] for each in ("stdlib", "purelib", "platlib")] + [os.path.dirname(each) for each in ours if each]
    return tuple(f"{folder}{os.sep}" for folder in folders)
