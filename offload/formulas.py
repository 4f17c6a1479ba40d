"""What a transformer's activations take by the formulas of the field, in elements and bytes; integers only.

``zhooks/activation/residual.py`` says what repeats in a model, reports in ``zhooks`` and ``zprof`` ask what that should hold.
It knows no model and no tensor.

Source: ZeRO, arXiv:1910.02054, section 3.2 (12 x hidden x batch x seq x layers elements); Korthikanti and others,
arXiv:2205.05198, section 4 (sbh(34 + 5as/h) bytes a layer, sbh(10 + 24/t + 5as/(ht)) under tensor parallelism, 2sbh where a
layer is recomputed from its input).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Layers"]

_MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that repeat in a forward, and how their inputs are kept.

    Attributes:
        count: how often one ran. batch, seq, hidden: the shape of its input. itemsize: bytes of an element of it.
        heads: of its attention; 0 where that is not known.
        tp: ranks the layers are divided over.
        checkpoint, tier, partition: the policy's [activation].
    """

    count: int
    batch: int
    seq: int
    hidden: int
    itemsize: int
    heads: int = 0
    tp: int = 1
    checkpoint: str = "none"
    tier: str = "device"
    partition: str = "none"

    @property
    def input_nbytes(self) -> int:
        """One layer's input."""
        return self.batch * self.seq * self.hidden * self.itemsize

    @property
    def saved_nbytes(self) -> int:
        """ZeRO's estimate of all that the layers save."""
        return 12 * self.count * self.input_nbytes

    @property
    def inputs_nbytes(self) -> int:
        """What is left of it where every layer is recomputed from its input: 2sbhL in 16 bits, divided under Pa."""
        return self.count * self.input_nbytes // (self.tp if self.partition == "tp" else 1)

    @property
    def korthikanti_nbytes(self) -> int | None:
        """Korthikanti's count for 16 bits, dropout and attention that keeps its scores; None where heads are not known."""
        if not self.heads:
            return None
        sbh, scores = self.batch * self.seq * self.hidden, 5 * self.heads * self.seq
        whole = 34 * self.hidden if self.tp == 1 else 10 * self.hidden + 24 * self.hidden // self.tp
        return self.count * sbh * (whole + scores // self.tp) // self.hidden

    @property
    def kept_nbytes(self) -> int:
        """By the formula that the policy asks for."""
        return self.inputs_nbytes if self.checkpoint == "unit" else self.saved_nbytes

    @property
    def words(self) -> str:
        """The formula and what is in it."""
        shape = f"batch {self.batch}, seq {self.seq}, hidden {self.hidden}, {self.itemsize} bytes"
        if self.checkpoint != "unit":
            return f"12 x hidden x batch x seq x layers: {self.count} layers, {shape}"
        divided = f", / {self.tp} tp" if self.partition == "tp" else ""
        return f"hidden x batch x seq x layers of inputs: {self.count} layers, {shape}{divided}"

    def text(self) -> str:
        """As one line of JSON, which ``read`` takes."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: object) -> Layers | None:
        """From such a line, maybe of a stranger's file; None where it is not one."""
        try:
            found = json.loads(text) if isinstance(text, str) else None
        except ValueError:
            return None
        return cls._of(found) if isinstance(found, dict) else None

    @classmethod
    def _of(cls, found: dict[str, Any]) -> Layers | None:
        numbers = [found.get(name) for name in ("count", "batch", "seq", "hidden", "itemsize", "heads", "tp")]
        words = [found.get(name) for name in ("checkpoint", "tier", "partition")]
        least = (1, 1, 1, 1, 1, 0, 1)
        if not all(type(number) is int and low <= number < _MOST for number, low in zip(numbers, least, strict=True)):
            return None
        return cls(*numbers, *words) if all(isinstance(word, str) for word in words) else None  # type: ignore[arg-type]
