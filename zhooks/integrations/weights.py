"""The whole weights of an attached model, for the files that the libraries write from rank 0."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The whole parameters and buffers of ``model`` on rank 0's CPU, {} on the others.  Collective."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
