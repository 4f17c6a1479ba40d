"""What the stacks of the interpreter and of autograd say: does a forward still run, what will this backward run, who called.

``reduce.py``, ``node.py``, ``run/runtime.py``, ``run/hooks.py`` and ``checkpoint/full_state.py`` ask.  It only looks: it
keeps no frame and changes nothing.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Asked", "Microbatch", "accumulates", "full_state_asked", "in_backward", "microbatch", "running", "transforms"]


def in_backward() -> bool:
    """This thread is inside autograd's engine."""
    return bool(torch._C._current_graph_task_id() >= 0)


def transforms() -> set[str]:
    """The transforms of torch.func that are running: "vmap", "grad" (jacrev, vjp, hessian too), "jvp" (jacfwd too)."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return set()
    return {interpreter.key().name.lower() for interpreter in functorch.get_interpreter_stack() or ()}


def running(frame: FrameType | None) -> bool:
    """That call has not returned, on any thread: on a GPU a backward inside a pass runs on a thread of its own."""
    return any(other is frame for top in sys._current_frames().values() for other, _ in traceback.walk_stack(top))


def accumulates(node: Any) -> bool:
    """All parameters behind ``node`` shall accumulate: backward().  Else autograd.grad or backward(inputs=...) chose some."""
    try:
        return all(torch._C._will_engine_execute_node(edge) for edge, _ in node.next_functions if edge is not None)
    except RuntimeError:
        # torch refuses to answer for a leaf that autograd.grad captures.
        return False


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A forward that a stage of torch's pipelining runs; ``real``: one of a step, not the look at shapes before the first.

    ``ranks``: those of the pipeline, a stage or more each.
    """

    stage: object
    index: int
    ranks: tuple[int, ...]
    real: bool


def microbatch(caller: FrameType | None) -> Microbatch | None:
    """What torch's pipelining calls for in the frames from ``caller`` outward; None where it does not."""
    module: Any = sys.modules.get("torch.distributed.pipelining.stage")
    if module is None:
        return None
    real = module._PipelineStageBase.forward_one_chunk.__code__
    shapes = getattr(module.PipelineStage, "_forward_metadata_inference", None)
    codes = (real, getattr(shapes, "__code__", None))
    while caller is not None:
        if caller.f_code in codes:
            stage = caller.f_locals["self"]
            group = dist.group.WORLD if stage.group is None else stage.group
            ranks = tuple(dist.get_process_group_ranks(group))
            return Microbatch(stage, stage.stage_index, ranks, caller.f_code is real)
        caller = caller.f_back
    return None


@dataclass(frozen=True, slots=True)
class Asked:
    """Full values are asked for: ``here``, on this rank, and on ``device``, None for that of the tensors."""

    here: bool
    device: torch.device | None


def full_state_asked(caller: FrameType | None) -> Asked | None:
    """What ``torch.distributed.checkpoint.state_dict`` wants with ``full_state_dict=True``, in the frames from ``caller`` on.

    It looks for DTensors in what ``state_dict()`` returns, and takes anything else for whole; its options are in its frame.
    """
    module: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if module is None:
        return None
    codes = [inspect.unwrap(found).__code__ for found in (module._get_model_state_dict, module._get_optim_state_dict)]
    while caller is not None:
        if caller.f_code in codes:
            info = caller.f_locals["info"]
            if not info.full_state_dict:
                return None
            first = not dist.is_initialized() or dist.get_rank() == 0
            return Asked(first or not info.cpu_offload, torch.device("cpu") if info.cpu_offload else None)
        caller = caller.f_back
    return None
