"""What autograd saves: kept, put on a tier, partitioned over tp, or computed again."""

from __future__ import annotations

from zhooks.activation.residual import Residual
from zhooks.activation.saved import SavedParameters
from zhooks.activation.undivided import DIVIDERS, DividedInput, Division, Undivided, check_axis

__all__ = ["DIVIDERS", "DividedInput", "Division", "Residual", "SavedParameters", "Undivided", "check_axis"]
