"""Globs of the policy that match nothing in the model, so that what they ask for is done nowhere.

``describe`` lists them, and ``attach`` and ``apply`` warn of them.  It only reads the model and its units.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from offload.policy import Policy
from zhooks.comm import Comm
from zhooks.compiled import named_modules
from zhooks.unit import Unit


def unmatched(model: nn.Module, units: Sequence[Unit], policy: Policy) -> list[str]:
    """Each as it stands in the policy file."""
    return [*_rules(units, policy), *_inputs(model, units, policy)]


def warn_of_unmatched(model: nn.Module, units: Sequence[Unit], policy: Policy, comm: Comm) -> None:
    """Say it once, from the first rank.  No error: one policy may serve several models; a stage of a pipeline lacks layers."""
    if comm.pipelined or comm.stage.axis.rank:
        return
    for text in unmatched(model, units, policy):
        warnings.warn(
            f"{text} matches nothing in this model, so it has no effect. Names are those of model.named_parameters() (for "
            "sharded_inputs, of modules); * matches dots too.",
            stacklevel=2,
        )


def _rules(units: Sequence[Unit], policy: Policy) -> Iterator[str]:
    names = [name for unit in units for first in unit.plan.group.params for name in unit.plan.group.names(first)]
    return (f'[[rule]] match = "{rule.match}"' for rule in policy.rule if not any(map(rule.matches, names)))


def _inputs(model: nn.Module, units: Sequence[Unit], policy: Policy) -> Iterator[str]:
    globs = policy.activation.sharded_inputs
    if not globs:
        return
    entries = {id(entry) for unit in units for entry in unit.entries}
    every = named_modules(model, remove_duplicate=False)
    entered = [unit.name for unit in units] + [name for name, module in every if id(module) in entries]
    yield from (
        f'[activation] sharded_inputs "{glob}"' for glob in globs if not any(fnmatchcase(name, glob) for name in entered)
    )
