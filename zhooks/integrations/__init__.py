"""zhooks where users already are: Accelerate, Lightning, the Trainer of transformers, and TRL.

Each module needs its library, which an extra installs, and is imported by its name: `from zhooks.integrations import
transformers as zh`.  ``from_pretrained`` is here, and at the top of zhooks, for it imports its library when it is called.
Nothing of a library is patched; what it offers to subclasses is used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from offload.policy import Policy
from zhooks.attach import Attachment, attach_requested
from zhooks.plan import Request

__all__ = ["from_pretrained"]


def from_pretrained(
    cls: Any,
    folder: str | os.PathLike[str],
    *,
    policy: Policy | str | Path | dict[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    trainable: bool = True,
    **changes: Any,
) -> Attachment:
    """Load a folder written by ``save_pretrained``, and attach the model.  Collective.

    The model is on the current CUDA device, or on the CPU if there is none, and in evaluation mode as in transformers.  No
    rank holds more than its shards, one unit, and 8 MiB of a file or the tensors that one parameter is converted from
    (merged experts).

    Args:
        cls: a class of transformers (``LlamaForCausalLM``) or an Auto class (``AutoModelForCausalLM``).
        folder: has config.json and safetensors files.  Every rank reads config.json, rank 0 the tensors.  Nothing is
            downloaded.
        policy: as in ``attach``.
        mesh: as in ``attach``.
        trainable: False freezes all parameters first, so that no gradients and optimizer states are planned: for inference.
        **changes: keys of the configuration to change, e.g. ``dtype=torch.bfloat16``.
    Returns:
        The attachment; its ``model`` is the model.
    Raises:
        CheckpointError: the folder cannot be read, or has the tensors of another model; on every rank.
        CapabilityError: transformers is missing or too old, the weights are quantized, or the model keeps some modules in
            another dtype than the others; on every rank.
    Warns:
        UserWarning: parameters that the folder lacks were initialized, e.g. a new classification head.
    """

    def request() -> Request:
        from zhooks.integrations.pretrained import requested

        return requested(cls, folder, policy, mesh, trainable, changes)

    return attach_requested(request)
