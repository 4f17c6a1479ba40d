"""Owns how a curve of a profile is read between its points.

The cost model and the fit call it. It never knows what a curve is of.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from offload.hardware.tables import Points

__all__ = ["fraction_at"]


def fraction_at(points: Points, size: float) -> float:
    """The curve's value at ``size``: between two points straight where both axes are logarithms, level beyond the last ones."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    after = bisect_right(points, size, key=lambda point: point[0])
    (low, at_low), (high, at_high) = points[after - 1], points[after]
    share = math.log(size / low) / math.log(high / low)
    return float(at_low * (at_high / at_low) ** share)
