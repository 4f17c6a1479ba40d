"""What batches are made of: how many rows and tokens, numbers of a configuration, values drawn.

``inputs.py`` and ``processed.py`` make batches of it.  It never knows an argument of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROWS, TOKENS = 2, 8
FRAMES, SAMPLES = 64, 4000

#: One argument's value, from the generator and the configuration.
Fill = Callable[[torch.Generator, Any], Any]


def number(config: Any, *names: str, default: int) -> int:
    """The first of these that the configuration, or one inside it, has as a number."""
    inner = [value for value in vars(config).values() if hasattr(value, "model_type")]
    for name in names:
        for one in (config, *inner):
            value = getattr(one, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[-1]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return int(value)
    return default


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)
