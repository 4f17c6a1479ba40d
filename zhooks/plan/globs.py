"""Globs of the policy that match nothing in the model, so that what they ask for is done nowhere."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from torch import nn

from offload.policy import Policy
from offload.user_warnings import warn_user
from zhooks import tree
from zhooks.comm import Comm
from zhooks.unit import Unit

__all__ = ["unmatched", "warn_of_unmatched"]

#: So many of the model's names are shown; and how like a glob's words theirs must be to be called close.
_SHOWN, _CLOSE = 3, 0.6
#: Of a glob, what stands between the words that names are compared with.
_BETWEEN_WORDS = re.compile(r"\[[^\]]*\]|[*?.]+")


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A glob that matches none of the names that it could.

    Attributes:
        text: as it stands in the policy file.
        names: all that it was compared with, and what these are ``of``.
    """

    text: str
    glob: str
    of: str
    names: Sequence[str]

    def __str__(self) -> str:
        return self.text

    def nearby(self) -> str:
        """Some of the names, in a sentence: those that are most like the glob, if any are, or else the first."""
        if close := _closest(self.glob, self.names):
            return f"The closest names of {self.of} are {', '.join(close)}"
        left = ", ..." if len(self.names) > _SHOWN else ""
        return f"The names of {self.of} are {', '.join(self.names[:_SHOWN])}{left}"


def unmatched(model: nn.Module, units: Sequence[Unit], policy: Policy) -> list[Unmatched]:
    """All of them, as the policy lists them."""
    params = [name for unit in units for first in unit.plan.group.params for name in unit.plan.group.names(first)]
    found = [
        Unmatched(f'[[rule]] match = "{rule.match}"', rule.match, "parameters", params)
        for rule in policy.rule
        if not any(map(rule.matches, params))
    ]
    globs, entries = policy.activation.sharded_inputs, {id(entry) for unit in units for entry in unit.entries}
    every = tree.named_modules(model, remove_duplicate=False) if globs else ()
    entered = [unit.name for unit in units] + [name for name, module in every if id(module) in entries]
    modules = [*dict.fromkeys(filter(None, entered))]
    return found + [
        Unmatched(f'[activation] sharded_inputs "{glob}"', glob, "modules", modules)
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in entered)
    ]


def warn_of_unmatched(model: nn.Module, units: Sequence[Unit], policy: Policy, comm: Comm) -> None:
    """Warn.  No error: one policy may serve several models; a stage of a pipeline lacks layers."""
    if comm.pipelined:
        return
    for each in unmatched(model, units, policy):
        warn_user(
            f"{each} matches nothing in this model, so it has no effect. {each.nearby()}; * matches dots too."
        )


def _closest(glob: str, names: Sequence[str]) -> list[str]:
    """The names that have a part like each of the glob's words, the closest first."""
    words = [word for word in _BETWEEN_WORDS.split(glob) if word]

    @cache
    def likeness(word: str, part: str) -> float:
        return difflib.SequenceMatcher(None, word, part, autojunk=False).ratio()

    scored = []
    for name in names if words else ():
        likenesses = [max(likeness(word, part) for part in name.split(".")) for word in words]
        if min(likenesses) >= _CLOSE:
            scored.append((-sum(likenesses), name))
    return [name for _, name in sorted(scored, key=lambda each: each[0])[:_SHOWN]]
