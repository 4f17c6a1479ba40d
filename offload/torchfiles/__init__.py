"""Files of ``torch.save``, read without running anything in them: plain data, and tensors by ranges."""

from __future__ import annotations

from offload.torchfiles.pickled import Made, Named, PickleError, interpret, plain
from offload.torchfiles.torch_file import Stored, TorchFile

__all__ = ["Made", "Named", "PickleError", "Stored", "TorchFile", "interpret", "plain"]
