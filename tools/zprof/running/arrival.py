"""Owns the moment a module that a script imports is there: what waits for it is called then.

`launch` and `follow` wait for torch with it, which the script imports when it likes, or never. It imports nothing itself, and
needs the standard library alone: a process that multiprocessing starts may load it before anything else.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["when_imported"]


class _Arrival:
    """A finder that finds nothing itself: it has ``do`` called once the module ``name`` has been executed."""

    def __init__(self, name: str, do: Callable[[], object]) -> None:
        self._name, self._do, self._looking = name, do, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for ``name`` with what the other finders say, and an ear on its loader."""
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "__dict__"):
            self._listen(spec.loader)
        return spec

    def _listen(self, loader: Any) -> None:
        execute = loader.exec_module
        # Another of us may listen already.
        listened = "exec_module" in vars(loader)

        def executed(module: types.ModuleType) -> None:
            if listened:
                loader.exec_module = execute
            else:
                del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    self._do()
                except Exception as error:
                    # The script's import went well; a filter that makes warnings errors must not reach it either.
                    with suppress(Warning):
                        warnings.warn(f"zprof: {self._name} is not followed: {type(error).__name__}: {error}", stacklevel=2)

        loader.exec_module = executed


def when_imported(name: str, do: Callable[[], object]) -> None:
    """Call ``do`` when the module ``name`` has been imported: now, if it has been."""
    if name in sys.modules:
        do()
    else:
        sys.meta_path.insert(0, _Arrival(name, do))
