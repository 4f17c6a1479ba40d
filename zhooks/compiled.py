"""torch.compile beside zhooks: what of ours stays outside compiled graphs.

``run/hooks.py`` marks its hooks, ``attach.py`` has the packages named to Dynamo.  It compiles nothing and changes no module.

Note: [Outside compiled graphs]
    What gathers and releases is bound to the moment it runs, and to this pass: traced into a graph it would happen at the
    wrong time, or break the graph at every operation that Dynamo does not know.  So Dynamo runs our hooks in Python: where
    compiled code calls a unit its graph breaks, once, and the unit's own ``forward`` is a graph of its own.  A sharded tensor
    that compiled code meets outside its module's forward (an average of weights, ``torch.compile(optimizer.step)``) breaks
    the graph too, and answers as it does in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

#: What torch says of a graph that breaks at our hooks.
REASON = "zhooks gathers the unit that is called here; compile units one by one, and fullgraph=True for these alone"


def outside_graphs(function: Function) -> Function:
    """Have Dynamo leave ``function``, and what it calls, to Python.  As ``torch.compiler.disable``, without a frame more: the
    runtime looks at who called it."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, REASON
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
