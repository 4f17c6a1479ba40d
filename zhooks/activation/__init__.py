"""What autograd saves: kept, put on a tier, partitioned over tp, or computed again."""

from __future__ import annotations

from zhooks.activation.partition import check_axis
from zhooks.activation.residual import Residual
from zhooks.activation.saved import SavedParameters

__all__ = ["Residual", "SavedParameters", "check_axis"]
