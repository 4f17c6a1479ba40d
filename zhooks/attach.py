"""``attach``: the one line that turns a model into a ZeRO model, and the Attachment it returns.

The only composition root: here the policy, the mesh, the comm, the units, the reducer, the runtime and the hooks are put
together and taken apart.  It never works during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from offload.errors import AttachError
from offload.events import Bus, Observer
from offload.policy import Policy
from zhooks import checkpoint, export, memory
from zhooks.agree import Agreement, least
from zhooks.build import (
    DTYPES,
    Ground,
    build_unit,
    loose_references,
    optimizers_of,
    plain_unit,
    relay_unit,
    scratch_for,
    shard_states,
)
from zhooks.checks import check_model, check_optimizer, check_ranks_equal, check_same_model
from zhooks.comm import CONTROL, Call, open_comm
from zhooks.describe import describe
from zhooks.hooks import Casts, install
from zhooks.materialize import Materializer
from zhooks.mesh import resolve
from zhooks.placement import Table
from zhooks.pool import Pool
from zhooks.reduce import Reducer, make_node
from zhooks.registries import Registries
from zhooks.runtime import Runtime
from zhooks.schedule import Choices
from zhooks.unit import Unit
from zhooks.units import find_units


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Policy | str | Path | dict[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    init: Callable[[nn.Module], None] | None = None,
    sync: bool = True,
) -> Attachment:
    """Train ``model`` with partitioned parameters, gradients and optimizer states; the training loop stays as it is.

    Args:
        model: any module, on the device it shall run on, or built under ``torch.device("meta")``.
        optimizer: needed only when it already holds state; its states are partitioned too.
        policy: a path to a TOML or JSON file, a dict, a ``Policy``, or None (stage 3, everything on the device).
        mesh: a DeviceMesh with a ``shard`` and optionally a ``replicate`` axis over the whole process group; None is one
            shard axis over all ranks, or a world of one without a process group.
        init: called with each module of a meta model to fill its own parameters and buffers.
        sync: broadcast rank 0's parameters and buffers; False verifies by hash that ranks are equal already.
    Returns:
        The Attachment; ``detach()`` undoes everything.
    Raises:
        PolicyError: the policy cannot be read.
        AttachError: model, optimizer or mesh cannot be attached; the model is as it was.
    """
    chosen = Policy.of(policy)
    device = check_model(model)
    check_optimizer(model, optimizer)
    axes = resolve(mesh)
    comm = open_comm(axes, chosen, device)
    try:
        return Attachment(model, optimizer, chosen, comm, Materializer(model, device, init, sync))
    except BaseException:
        comm.close()
        raise


class Attachment:
    """A model under ZeRO.  Made by ``attach``; the model knows it until ``detach``."""

    def __init__(self, model: nn.Module, optimizer: Any, policy: Policy, comm: Any, materializer: Materializer) -> None:
        self.model, self.policy = model, policy
        self._comm, self._bus = comm, Bus()
        self._table = Table.of(policy.table())
        self._pool = Pool(0)
        self._ground = Ground(policy, self._table, comm, self._pool, self._bus, materializer.sync)
        self._optimizer = optimizer
        self._registries = Registries()
        self._units: list[Unit] = []
        if not materializer.sync:
            check_ranks_equal(model, comm.world)
        self._build(materializer)
        reducer = Reducer(
            comm, self._pool, self._bus, most=policy.schedule.max_reductions, unreduced=self._table.accumulates_unreduced
        )
        schedule = policy.schedule
        budget = least(comm.world, policy.budget.device)
        choices = Choices(schedule.prefetch, schedule.reshard_after_forward, budget)
        self._node = make_node(reducer)
        self._wire()
        self._runtime = Runtime(self._units, reducer, self._bus, choices, Agreement(comm.world))
        self._runtime.relay = self._relay  # type: ignore[method-assign]
        casts = Casts(_dtype(policy.precision.param) if policy.precision.cast_inputs else None, _dtype(policy.precision.output))
        self._handles = install(model, self._units, self._runtime, casts)
        self._registries.open()

    def _build(self, materializer: Materializer) -> None:
        groups = find_units(self.model, self.policy)
        check_same_model(groups, self._comm.world)
        scratch = scratch_for(groups, self._ground, materializer.device)
        try:
            with loose_references(self.model):
                for number, group in enumerate(groups):
                    self._units.append(Unit(group.name, number, group.entries))
                    build_unit(self.model, group, self._units[-1], self._ground, materializer, scratch)
                    if self._optimizer is not None:
                        shard_states(self._units[-1], self._optimizer)
            materializer.buffers(self._comm.world)
        except BaseException:
            with loose_references(self.model):
                for unit in self._units:
                    plain_unit(unit, [self._optimizer] if self._optimizer is not None else [])
            raise
        sizes = sorted(
            (
                flat.layout.padded * max(flat.kind.compute.itemsize, flat.kind.reduce.itemsize)
                for unit in self._units
                for flat in unit.flats
            ),
            reverse=True,
        )
        self._pool.idle_nbytes = sum(sizes[: 2 + self.policy.schedule.prefetch])

    def _wire(self) -> None:
        for unit in self._units:
            for flat in unit.flats:
                flat.node = self._node if flat.kind.trainable else None

    def _relay(self) -> None:
        """Follow parameters that were frozen or unfrozen since the last step."""
        self._runtime.reducer.flush()
        optimizers = optimizers_of(self.model.parameters())
        for unit in self._units:
            relay_unit(unit, self._ground, optimizers, self.model)
        self._wire()
        self._runtime.take(self._units)

    def detach(self) -> nn.Module:
        """Restore the plain model: full parameters, gradients and known optimizer states, no hook left.  Collective."""
        if not self._handles:
            raise AttachError("detach: expected an attached model, found one that was detached already. Attach it again first.")
        self._runtime.settle()
        self._runtime.reducer.flush()
        while self._handles:
            self._handles.pop().remove()
        optimizers = optimizers_of(self.model.parameters())
        with loose_references(self.model):
            for unit in self._units:
                plain_unit(unit, optimizers)
        self._registries.close()
        self._pool.clear()
        self._comm.world.all_reduce(Call(CONTROL, "detach", "all units"), torch.zeros(1), "sum")
        self._comm.close()
        return self.model

    @contextmanager
    def gathered(self, *parameters: Tensor, write: bool = False) -> Iterator[list[Tensor]]:
        """Full plain values of ``parameters`` (all of them when none is named) inside the block; yields them in order.

        Also found at the modules' attributes inside the block.  With ``write=True`` rank 0's changes reach every shard.
        Collective: every rank enters with the same parameters.
        """
        with checkpoint.gathered(
            self._units, self._runtime, self._comm, parameters or tuple(self.model.parameters()), write
        ) as full:
            yield full

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keep every unit gathered inside the block: generation, evaluation in many short forwards.  Collective."""
        with self._runtime.resident():
            yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate.  Stages 0 and 1 defer the reduction to the first backward outside; where the
        policy partitions gradients (stages 2 and 3) each backward still reduces into the shards, as memory demands."""
        reducer = self._runtime.reducer
        self._runtime.settle()
        before, reducer.sync = reducer.sync, False
        try:
            yield
        finally:
            self._runtime.settle()
            reducer.sync = before

    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Full state on rank 0's CPU, {} elsewhere: {"model": {name: tensor}} and "optimizer" when one is known.

        Streamed unit by unit.  The plain model loads it.  Collective.
        """
        self._runtime.settle()
        return checkpoint.full_state(self.model, self._units, self._comm, optimizer or self._optimizer)

    def load_state_dict(self, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what ``state_dict`` made (rank 0's is used; others may pass {}), on any number of ranks.  Collective."""
        self._runtime.settle()
        checkpoint.load_full_state(self.model, self._units, self._comm, state, optimizer or self._optimizer)

    def save_full(self, path: str | Path) -> None:
        """Write full parameters and buffers as safetensors from rank 0, one parameter in memory at a time.  Collective."""
        self._runtime.settle()
        export.save_full(self.model, self._units, self._comm, Path(path))

    def memory(self) -> memory.MemoryReport:
        """Bytes this rank holds, what x tier, from the storages that exist, beside the formula."""
        return memory.report(
            self._units, self._runtime.reducer, self._comm, self._table, optimizers_of(self.model.parameters())
        )

    def observe(self, observer: Observer) -> Observation:
        """Send the runtime's events to ``observer`` until the returned handle is closed."""
        self._bus.attach(observer)
        return Observation(self._bus, observer)

    def describe(self) -> str:
        """A table: unit, parameters, numel, padding, placement; after a step also what the plan moves."""
        return describe(self._units, self._table, self._comm, self.payload())

    def payload(self) -> int | None:
        """Bytes of gathers and reductions one training step moves by the plan (full payloads); None before a first step."""
        return self._runtime.payload()

    @property
    def rank(self) -> int:
        return int(self._comm.world.axis.ranks[self._comm.world.axis.rank])


class Observation:
    """An observer that listens; ``close()`` or leaving the ``with`` block ends it."""

    def __init__(self, bus: Bus, observer: Observer) -> None:
        self._bus, self.observer = bus, observer

    def close(self) -> None:
        self._bus.detach(self.observer)

    def __enter__(self) -> Observation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
