"""TRL: ``SFTTrainer(..., zhooks="policy.toml")`` and the other trainers of ``trl``, by the same names, under ZeRO.

Each is TRL's own with ``ZeroMixin`` before it; reference and reward models are sharded as well, by the same policy.  What TRL
generates with is refused where it would take weights past the attachment.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from offload.errors import CapabilityError
from zhooks.integrations.required import require
from zhooks.integrations.transformers import TrainingArguments, ZeroMixin

require("trl", "trl", (1, 0))

import trl  # noqa: E402

__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "RLOOConfig",
    "RLOOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
]


# TRL's come first: their defaults are others than those of transformers.
@dataclass
class SFTConfig(trl.SFTConfig, TrainingArguments):  # type: ignore[misc]
    """``trl.SFTConfig``, as ``TrainingArguments`` of ``zhooks.integrations.transformers``; so are those below."""


@dataclass
class DPOConfig(trl.DPOConfig, TrainingArguments):  # type: ignore[misc]
    """``trl.DPOConfig``."""


@dataclass
class KTOConfig(trl.KTOConfig, TrainingArguments):  # type: ignore[misc]
    """``trl.KTOConfig``."""


@dataclass
class RewardConfig(trl.RewardConfig, TrainingArguments):  # type: ignore[misc]
    """``trl.RewardConfig``."""


@dataclass
class _GeneratingArguments(TrainingArguments):
    """``generate_resident``: gather the whole model once for each generation, not each unit for each token."""

    generate_resident: bool = False


@dataclass
class GRPOConfig(trl.GRPOConfig, _GeneratingArguments):  # type: ignore[misc]
    """``trl.GRPOConfig``, and ``generate_resident``."""


@dataclass
class RLOOConfig(trl.RLOOConfig, _GeneratingArguments):  # type: ignore[misc]
    """``trl.RLOOConfig``, and ``generate_resident``."""


class SFTTrainer(ZeroMixin, trl.SFTTrainer):  # type: ignore[misc]
    """``trl.SFTTrainer`` under ZeRO."""


class DPOTrainer(ZeroMixin, trl.DPOTrainer):  # type: ignore[misc]
    """``trl.DPOTrainer`` under ZeRO; the reference model, where there is one, is sharded too."""


class KTOTrainer(ZeroMixin, trl.KTOTrainer):  # type: ignore[misc]
    """``trl.KTOTrainer`` under ZeRO; the reference model, where there is one, is sharded too."""


class RewardTrainer(ZeroMixin, trl.RewardTrainer):  # type: ignore[misc]
    """``trl.RewardTrainer`` under ZeRO."""


class _Generating(ZeroMixin):
    """A trainer that generates with the model it trains, by ``generate``: each unit gathered at its uses, or all once."""

    def _generate(self, prompts: list[Any]) -> Any:
        base: Any = super()
        resident = getattr(self.args, "generate_resident", False) and self.attachment is not None
        with self.attachment.resident() if resident else nullcontext():  # type: ignore[union-attr]
            return base._generate(prompts)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if getattr(self.args, "generate_resident", False) and not hasattr(super(), "_generate"):
            raise CapabilityError(
                f"{type(self).__name__} expected a trl whose trainers have `_generate`, found {trl.__version__} "
                "and generate_resident = True. Drop it, or update trl."
            )
        for name in ("use_vllm", "use_transformers_continuous_batching", "use_transformers_paged"):
            if getattr(self.args, name, False):
                raise CapabilityError(
                    f"{type(self).__name__} expected to generate with the attached model, found {name} = True, which copies "
                    "or casts weights of which each rank has a shard. Drop it."
                )


class GRPOTrainer(_Generating, trl.GRPOTrainer):  # type: ignore[misc]
    """``trl.GRPOTrainer`` under ZeRO; reference and reward models are sharded too."""


class RLOOTrainer(_Generating, trl.RLOOTrainer):  # type: ignore[misc]
    """``trl.RLOOTrainer`` under ZeRO; reference and reward models are sharded too."""
