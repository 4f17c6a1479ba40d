"""What an attachment does with a policy that was chosen for it: how it goes over to another one after three steps.

``Attachment`` is one of these.  It connects ``planning/replanning.py`` with what it asks of a run; it never decides anything.
"""

from __future__ import annotations

from functools import partial

from offload.errors import DivergenceError
from offload.events import Bus
from offload.policy import Policy
from zhooks.build import Tiers
from zhooks.comm import Comm
from zhooks.optim import Optimizers
from zhooks.planning import Choice, Replanning
from zhooks.run import Runtime


class Chosen:
    """The second look at a policy that was chosen."""

    policy: Policy
    _why: str
    _bus: Bus
    _comm: Comm
    _tiers: Tiers
    _runtime: Runtime
    _optimizers: Optimizers
    _replanning: Replanning | None

    def _change(self, policy: Policy) -> None:
        """As ``apply``."""
        raise NotImplementedError

    def _watched(self, choice: Choice) -> Replanning | None:
        """Who looks at it again; nobody in a pipeline, whose stages wait for each other at other moments."""
        if self._comm.pipelined:
            return None
        runtime = self._runtime
        return Replanning(
            choice, self._comm, self._bus,
            quiet=lambda: runtime.quiet,
            optimizers=partial(self._optimizers.agreed, "plan again"),
            placed=lambda tier: self._tiers.placed(tier),
            change=self._go_over,
            tell=self._tell_why,
        )  # fmt: skip

    def _plan_again(self) -> None:
        """A training pass begins, on every rank.  Collective."""
        if self._replanning is not None:
            self._replanning.training_begins()

    def _go_over(self, chosen: Policy) -> str:
        """Go on under another policy; "", or why it could not be, and everything is as it was.  Collective."""
        why = self._why
        try:
            self._change(chosen)
        except DivergenceError:
            raise
        except Exception as error:
            return str(error)
        finally:
            self._why = why
        return ""

    def _tell_why(self, why: str) -> None:
        self._why = f"{self._why}\n{why}"
        self._bus.instant("policy replanned", why)
