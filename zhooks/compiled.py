"""torch.compile beside zhooks: what of ours stays outside compiled graphs, and models seen through the wrappers it makes.

Note: [Outside compiled graphs]
    What gathers and releases is bound to the moment it runs, and to this pass: traced into a graph it would happen at the
    wrong time, or break the graph at every operation that Dynamo does not know.  So Dynamo runs our hooks in Python: where
    compiled code calls a unit its graph breaks, once, and the unit's own ``forward`` is a graph of its own.  A sharded tensor
    that compiled code meets outside its module's forward (an average of weights, ``torch.compile(optimizer.step)``) breaks
    the graph too, and answers as it does in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from offload.errors import SimulationError
from offload.user_warnings import warn_user

Function = TypeVar("Function", bound=Callable[..., Any])

#: What torch says of a graph that breaks at our hooks: at a unit, and at a module that a [[rule]] gives another dtype.
REASON = "zhooks gathers the unit that is called here; compile units, fullgraph=True only for these; detach() to export"
CASTS = "zhooks casts here to the dtype that a [[rule]] gives only this module; let the rule match whole units"


def outside_graphs(function: Function, why: str = REASON) -> Function:
    """Have Dynamo leave ``function``, and what it calls, to Python.  As ``torch.compiler.disable``, without a frame more: the
    runtime looks at who called it."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, why
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def keep_outside_graphs() -> None:
    """Have Dynamo trace nothing of these packages; once a process."""
    # Imported here: it takes half a second, and whoever builds an optimizer has it by now.
    from torch._dynamo import trace_rules

    for package in ("zhooks", "offload"):
        if package not in _told:
            trace_rules.add(package)
            _told.add(package)


_told: set[str] = set()


def uncompiled(module: Any) -> Any:
    """The module inside what ``torch.compile`` returned for it; anything else is itself."""
    known: Any = sys.modules.get("torch._dynamo.eval_frame")
    while known is not None and isinstance(module, known.OptimizedModule):
        module = module._orig_mod
    return module


def plain_name(name: str) -> str:
    """What a module or parameter is called where nothing is compiled."""
    return ".".join(word for word in name.split(".") if word != "_orig_mod") if "_orig_mod" in name else name


@contextmanager
def kernels_refused() -> Iterator[None]:
    """Inside, on the virtual device, a backend of ``torch.compile`` that makes kernels (inductor) is refused by name.

    Raises:
        SimulationError: code that is compiled by one was called.
    """
    try:
        yield
    except Exception as error:
        known: Any = sys.modules.get("torch._dynamo.exc")
        if known is None or not isinstance(error, known.BackendCompilerFailed):
            raise
        raise SimulationError(
            'simulate expected code that is not compiled, or with backend="aot_eager", because the cost of compiled kernels '
            'is '
            f"known only on their device; found {type(error).__name__}: {str(error).splitlines()[0]}. Simulate it "
            'uncompiled, inside torch.compiler.set_stance("force_eager"): fused kernels are faster and save other activations.'
        ) from error


class Breaks:
    """Tells the user once, of one attachment, that compiled code calls its units."""

    def __init__(self) -> None:
        self._before, self._told = _breaks(), False

    def look(self) -> None:
        """A pass along a new path is over."""
        if not self._told and _breaks() > self._before:
            self._told = True
            warn_user(
                "torch.compile: compiled code calls units of an attached model. Their parameters are gathered there, so the "
                "graph breaks at each call, and a function that calls units in a loop runs in Python; the units themselves "
                "are compiled. Compile them one by one (`for block in model.blocks: block.compile()`) to have no breaks."
            )


def _breaks() -> int:
    """How often a graph broke at our hooks in this process."""
    known: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if known is None else sum(times for why, times in known.counters["graph_break"].items() if REASON in why)
