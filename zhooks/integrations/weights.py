"""The whole weights of an attached model, for the files that the libraries write from rank 0."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from offload.errors import CheckpointError
from zhooks.attach import Attachment


def whole_weights(model: nn.Module, attachment: Attachment) -> dict[str, Any]:
    """The whole parameters and buffers of ``model`` on rank 0's CPU, {} on the others.  Collective.

    Raises:
        CheckpointError: the model has parameters that no state holds; on every rank.
    """
    if attachment.left_out:
        raise CheckpointError(
            f"Cannot write whole weights. Expected plain parameters, found {len(attachment.left_out)} frozen of tensor "
            f"subclasses (quantised), such as {attachment.left_out[0]}: only their library can write their values. Save only "
            "the adapters (attachment.state_dict(), a Trainer with PEFT adapters), or shards: attachment.save()."
        )
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def adapter_weights(attachment: Attachment) -> dict[str, Any]:
    """Those that belong to the adapters of PEFT on a quantised base, and all else that is sharded; on rank 0.  Collective.

    Raises:
        CheckpointError: there are no adapters, so that a file of these would look like the model; on every rank.
    """
    model: Any = attachment.model
    if not getattr(model, "peft_config", None):
        return whole_weights(model, attachment)
    weights: dict[str, Any] = attachment.state_dict().get("model", {})
    return weights
