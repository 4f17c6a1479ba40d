"""torchft: ``Replicas(attachment, optimizer, pg=..., min_replica_size=...)``; the loop stays the one of torchft's README.

A subclass of torchft's Manager: each replica is a job of its own, its ranks attached among themselves, and gradients are means
over the living replicas by the Manager's all-reduce.  A replica that returns takes its state over from a living one, rank by
rank; nothing of torchft is patched.

Note: [One step]
    ``start_quorum`` (by ``zero_grad`` of torchft's Optimizer) finds out who lives, hands states on and compares all replicas;
    backward sums; ``should_commit`` says whether the step counts.  What goes wrong on one rank on the way is told to all ranks
    of its replica before any of them goes on, for they take the next collective together: such a replica takes no part in the
    step, and does not commit it.

Note: [Torn]
    A state is written where it belongs as it arrives.  If the peer dies meanwhile, this replica is torn: it keeps the step it
    was at, so that the next quorum hands it a state again, and raises where no living replica is ahead of it.

Note: [Histories]
    The lighthouse may see two halves apart (a network that is divided, machines that stand still in turns), each of which
    makes the same number of steps without the other.  So the replicas of a step draw a number for it, the largest of their
    own, and keep the exclusive or of all steps that counted, beside the number of updates that were made: where these differ,
    values are compared as if a replica joined.
"""

from __future__ import annotations

import os
import secrets
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from offload.errors import AttachError, CapabilityError, CheckpointError, DivergenceError, ShardedOpError, ZhooksError
from offload.user_warnings import warn_user
from zhooks.attach import Attachment
from zhooks.checkpoint import Packer
from zhooks.comm import Call
from zhooks.integrations.peer_transfer import PeerTransfer
from zhooks.resilience import PeerLostError, Replica

import torchft  # isort: skip
from torchft import Optimizer  # isort: skip
from torchft.manager import TIMEOUT_SEC_ENV  # isort: skip
from torchft.process_group import ProcessGroup  # isort: skip

__all__ = ["Optimizer", "Replicas"]

T = TypeVar("T")

#: What cannot be what the user says, and what it is.
_FIXED = {"use_async_quorum": False, "init_sync": False, "checkpoint_transport": None}


class _Found(IntEnum):
    """What a comparison with the other replicas came to, the worst last."""

    SAME = 0
    LOST = 1
    OTHER_RUN = 2
    OTHER_VALUES = 3


class Replicas(torchft.Manager):  # type: ignore[misc]
    """torchft's Manager for an attached model: quorums, mean gradients over replicas, and state for returning replicas.

    Every rank of a replica creates one, after ``attach``.  Replicas must start from the same values (the same seed, or the same
    checkpoint), which is checked.

    Args:
        attachment: that of the model, over the ranks of this replica.
        optimizer: the one or several that step its parameters.
        pg: a reconfigurable process group of torchft, such as ``ProcessGroupGloo()``.
        min_replica_size: how many replicas a step needs in order to count.
        timeout: for a reduction over replicas and for each answer of a peer; below the policy's ``[comm] timeout_s``.
        **options: torchft's own: ``state_dict`` and ``load_state_dict`` (plain data in addition to model and optimizer),
            ``quorum_timeout``, ``lighthouse_addr``, ``replica_id`` and others.
    Raises:
        CapabilityError: replicas that come and go cannot train this; on every rank.
        AttachError: an option of torchft that is not possible here.
    """

    def __init__(
        self,
        attachment: Attachment,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        pg: ProcessGroup,
        min_replica_size: int,
        *,
        timeout: timedelta = timedelta(seconds=60),
        hostname: str | None = None,
        **options: Any,
    ) -> None:
        given: Sequence[Any] = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        bare: list[torch.optim.Optimizer] = [each.optim if isinstance(each, Optimizer) else each for each in given]
        self._replica = Replica(attachment.session, bare)
        self._replica.run_together(lambda: _check_options(attachment, timeout, options))
        for name in _FIXED:
            options.pop(name, None)
        self._attached = attachment
        self._beside: dict[str, Callable[[], Any]] = {}
        self._begun = self._torn = self._compared = False
        # Of the steps made since replicas were compared, and the number that this step's replicas have drawn for it.
        self._history = self._drawn = self._counted = 0
        self._scale: dict[str, Any] = {}
        self._replica.reduce_over(_Jobs(self))
        # It calls a deprecated method of a logger; where warnings are errors it would take that for a lost replica.
        warnings.filterwarnings("ignore", "The 'warn' method is deprecated", DeprecationWarning, r"torchft\.manager")
        hostname = hostname or socket.gethostname()
        self._transfer = PeerTransfer(hostname, self._beside)
        if dist.is_initialized():
            options = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), **options}
        # torchft wants functions, for its own part of the state.
        options.setdefault("state_dict", dict)
        options.setdefault("load_state_dict", lambda state: None)
        try:
            super().__init__(
                pg, options.pop("load_state_dict"), options.pop("state_dict"), min_replica_size, use_async_quorum=False,
                init_sync=False, checkpoint_transport=self._transfer, timeout=timeout, hostname=hostname, **options,
            )  # fmt: skip
        except BaseException:
            self._transfer.shutdown()
            self._replica.reduce_over(None)
            raise

    def register_state_dict_fn(self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """Like torchft's: plain data and tensors that a returning replica takes over too; nothing is pickled."""
        super().register_state_dict_fn(key, load_state_dict, state_dict)
        self._beside[key] = state_dict

    def shutdown(self, wait: bool = True) -> None:
        """From now on, train only with the ranks of this replica.  Collective over them."""
        super().shutdown(wait=wait)
        self._replica.reduce_over(None)

    # One step.

    def start_quorum(self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None) -> None:
        """Begin a step: find out which replicas are alive, send state to returning ones, and compare.  Collective over them.

        Raises:
            AttachError: replicas run another model, policy or step, or did not start from the same values.
            CheckpointError: the state of a peer cannot be loaded, or this replica's is incomplete and so is every peer's.
        """
        if not allow_heal:
            raise CapabilityError(
                "torchft expected a quorum that heals replicas which return, found allow_heal=False. Use DiLoCo and "
                "LocalSGD with a model that is not attached."
            )
        self._replica.check()
        self._replica.forget_gradients()
        self._scale = self._attached.loss_scale_state()
        before = self.state_dict()
        self._transfer.begin()
        with _answers("quorum"):
            super().start_quorum(allow_heal, shrink_only, timeout)
        self._begun = True
        try:
            if self._states_handed_on(before):
                self._compare()
        finally:
            self._transfer.end()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Like torchft's; if the step does not count, its gradients are dropped."""
        self._attached.session.runtime.due()
        self._begun = False
        with _answers("should_commit"):
            commit = super().should_commit(timeout)
        if commit:
            self._history ^= self._drawn
        else:
            self._replica.forget_gradients()
            self._attached.load_loss_scale_state(self._scale)
        return bool(commit)

    @property
    def in_step(self) -> bool:
        """Whether this replica is between ``start_quorum`` and ``should_commit``."""
        return self._begun

    def _states_handed_on(self, before: dict[str, int]) -> bool:
        """Serve peers, or take the state of one; whether this replica goes on with the step.  Collective over its ranks."""
        transfer = self._transfer
        arriving, asked = transfer.arriving, transfer.asked
        failed = self.errored() is not None
        problem = transfer.refused
        agreed = self._replica.largest(
            "quorum", [failed, arriving is not None, arriving is None, self._torn, problem is not None]
        )
        some_failed, some_heal, some_keep, torn, refused = map(bool, agreed)
        if refused:
            raise problem or CheckpointError("torchft expected the state of a peer, found it refused to another rank.")
        if asked is not None:
            transfer.serve(self._offer(asked.beside, torn), asked)
        if some_heal and (some_failed or some_keep):
            # Users' objects may have taken the peer's state already.
            self._give_up(before, "another rank of this replica lost its peer")
            return False
        if some_failed:
            self._skip("another rank of this replica has no quorum")
            return False
        if arriving is not None:
            try:
                self._replica.take_state(arriving.where, arriving.header, arriving.ask)
            except PeerLostError as error:
                self._give_up(before, str(error))
                return False
            # The peer waits for the end of what it serves before it compares.
            transfer.end()
            self._torn, self._compared = False, False
        elif torn:
            raise CheckpointError(
                "torchft expected a live replica with a complete state, because the last one died during the transfer, found "
                "none that is ahead. Restart this replica from a checkpoint."
            )
        elif not self._compared and self.current_step() == 0:
            _warn_of_a_start_over()
        return True

    def _offer(self, beside: dict[str, Any], torn: bool) -> Any:
        if torn:
            return CheckpointError("an incomplete state, whose own peer died during the transfer")
        try:
            return self._replica.offered_state(beside)
        except CheckpointError as error:
            # The one who returns shall know why; those who live go on.
            return error

    def _give_up(self, before: dict[str, int], why: str) -> None:
        self._torn = True
        self.load_state_dict(before)
        self._skip(why)

    def _skip(self, why: str) -> None:
        """This replica takes no part in the step.  All its ranks come here."""
        if self.errored() is None:
            self.report_error(PeerLostError(f"torchft: {why}"))

    def _compare(self) -> None:
        """All replicas are the same run at the same step, and once one has joined, of the same values.  Collective over all."""
        if not self._compared:
            self._replica.run_together(self._check_plain)
            self._replica.meet_optimizers()
        self._drawn = secrets.randbits(62)
        if self.num_participants() == 1:
            self._compared = True
            return
        facts = _number(self._replica.facts())
        found, joins, apart = self._agreed([facts, self.current_step()], _Found.OTHER_RUN)
        if found is _Found.SAME and apart:
            digest = self._replica.offered_state({}).digest()
            found, _, _ = self._agreed([_number(digest)], _Found.OTHER_VALUES)
            if found is _Found.SAME:
                self._compared = True
                self._history, self._counted = self._drawn, self._attached.session.steps.count
        if found is _Found.SAME:
            return
        if found is _Found.LOST or (self._compared and joins):
            # A replica that has been the same does not go for one that is not.
            self._skip("the replicas could not be compared" if found is _Found.LOST else "another replica differs")
            return
        if found is _Found.OTHER_RUN:
            raise AttachError(
                "torchft expected replicas with the same model, policy and optimizer at the same step, found one that differs "
                f"from this one at step {self.current_step()}. Run one program in all, and apply() in all before the same "
                "step; with a checkpoint, load the state_dict() of Replicas too."
            )
        if self._compared:
            raise AttachError(
                "torchft expected replicas that have made the same steps, found one with different values: they have trained "
                "separately, or only one of them has changed values or skipped an update. Stop all replicas but one, and "
                "restart them."
            )
        raise AttachError(
            "torchft expected replicas that start from the same parameters and optimizer states, found one with different "
            "values. Set the same seed in all replicas before building the model, or load the same checkpoint in all."
        )

    def _agreed(self, numbers: Sequence[int], otherwise: _Found) -> tuple[_Found, bool, bool]:
        """Whether all ranks at this place of all replicas have these numbers, and all ranks of this replica found so; whether
        a replica joins; and whether one does, or replicas have not made the same steps: see Note [Histories]."""
        made = self._history + self._attached.session.steps.count - self._counted
        mine = [*numbers, made]
        numbers = [*mine, *(-number for number in mine), int(not self._compared), self._drawn]
        seen = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        lost = not self.largest_of_replicas(seen)
        high, low = seen[: len(mine)].tolist(), (-seen[len(mine) : -2]).tolist()
        found = _Found.LOST if lost else _Found.SAME if high[:-1] == low[:-1] else otherwise
        joins, self._drawn = int(seen[-2]), int(seen[-1])
        worst, joins, apart = self._replica.largest("compare replicas", [int(found), joins, int(high[-1] != low[-1])])
        return _Found(worst), bool(joins), bool(joins or apart)

    def largest_of_replicas(self, values: Tensor) -> bool:
        """Set each of ``values`` to the largest of all replicas; return False, with nothing changed, if a replica was lost."""
        kept = values.clone()
        self.allreduce(values, reduce_op=dist.ReduceOp.MAX).wait()
        if self.errored() is None:
            return True
        values.copy_(kept)
        return False

    def _check_plain(self) -> None:
        """Refuse at once what a replica that returns could not be handed."""
        for state_dict in self._beside.values():
            Packer().pack(state_dict(), "the state that goes with the model")


class _Sum:
    """A sum over replicas; zeros where one of them was lost, for the step will not count."""

    def __init__(self, replicas: Replicas, work: Any, out: Tensor) -> None:
        self._replicas, self._work, self._out = replicas, work, out
        self._over = False

    def wait(self) -> None:
        if not self._over:
            self._over = True
            self._work.wait()
            if self._replicas.errored() is not None:
                self._out.zero_()

    def done(self) -> bool:
        return self._over


class _Jobs:
    """The replicas of a job, as reductions see them."""

    several = jobs = True

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def averaged(self) -> int:
        return max(1, int(self._replicas.num_participants()))

    def add_up(self, call: Call, out: Tensor) -> _Sum:
        if not self._replicas.in_step:
            raise ShardedOpError(
                f"{call.what} {call.key} expected backward inside a step over replicas, found none started. Call "
                "zero_grad() of torchft's Optimizer, or start_quorum(), before the forward."
            )
        return _Sum(self._replicas, self._replicas.allreduce(out, reduce_op=dist.ReduceOp.SUM), out)

    def merge(self, flags: Tensor) -> None:
        if self._replicas.in_step:
            self._replicas.largest_of_replicas(flags)


@contextmanager
def _answers(what: str) -> Iterator[None]:
    """Name who does not answer: all ranks of a replica ask the Manager's server that its rank 0 has, and that the lighthouse.

    Raises:
        DivergenceError: it is gone, or has not answered in time.
    """
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        if isinstance(error, ZhooksError) or "max_retries" in str(error):
            raise
        raise DivergenceError(
            f"torchft {what} expected an answer from this replica's Manager, on rank 0, and from the lighthouse, found "
            f"{type(error).__name__}: {' '.join(str(error).split())[:200]}. Look at that rank's own output and at the "
            "lighthouse, and restart this replica."
        ) from error


def _warn_of_a_start_over() -> None:
    """Say that training begins at step 0 in ranks that torchrun has started again: no living replica has more."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0":
        warn_user(
            "torchft expected a live replica to get the state from, because torchrun has restarted these ranks (restarts: "
            f"{restarts}), found none beyond step 0: training begins at step 0. To continue from a checkpoint, load it and "
            "the state_dict() of Replicas before the first step.",
            RuntimeWarning,
        )


def _number(digest: str) -> int:
    """63 bits of a checksum."""
    return int(digest[:16], 16) >> 1


def _check_options(attachment: Attachment, timeout: timedelta, options: dict[str, Any]) -> None:
    for name, kept in _FIXED.items():
        if options.get(name, kept) != kept:
            raise AttachError(f"torchft expected {name} = {kept}, as the transfer of states by rank needs. Drop the option.")
    mode = options.get("world_size_mode")
    if mode is not None and getattr(mode, "name", "") != "DYNAMIC":
        raise AttachError("torchft expected world_size_mode DYNAMIC, found spares, which are untested. Drop the option.")
    timeout = _in_force(timeout)
    if timeout.total_seconds() >= attachment.policy.comm.timeout_s:
        raise AttachError(
            f"torchft expected a timeout below the policy's [comm] timeout_s, {attachment.policy.comm.timeout_s:g} s, because "
            f"ranks wait for one that waits for another replica, found {timeout.total_seconds():g} s. Lower it, or "
            f"{TIMEOUT_SEC_ENV}, which overrides it."
        )
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and not (options.get("lighthouse_addr") or os.environ.get("TORCHFT_LIGHTHOUSE")):
        raise AttachError(
            "torchft expected the address of a lighthouse, found none. Start torchft_lighthouse and set TORCHFT_LIGHTHOUSE, "
            "or pass lighthouse_addr."
        )


def _in_force(timeout: timedelta) -> timedelta:
    """What torchft makes of a timeout: the environment comes first."""
    given = os.environ.get(TIMEOUT_SEC_ENV)
    try:
        return timedelta(seconds=int(given)) if given is not None else timeout
    except ValueError:
        raise AttachError(f"torchft expected {TIMEOUT_SEC_ENV} to be whole seconds, found {given!r}. Set a number.") from None
