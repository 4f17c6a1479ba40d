"""Folders of ``torch.distributed.checkpoint``, read without unpickling: tensors whole, by the names they were saved under."""

from __future__ import annotations

from offload.dcp.metadata import is_distributed
from offload.dcp.whole import DistributedModel

__all__ = ["DistributedModel", "is_distributed"]
