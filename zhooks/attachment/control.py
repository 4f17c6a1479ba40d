"""What an attachment lets a loop decide for parts of the model: what stays gathered, and hooks on reductions.

``Attachment`` is one of these.  It hands each verb to the package that does it; it never decides when a pass gathers or
reduces.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from offload.errors import AttachError
from zhooks import tree
from zhooks.comm import Comm, ControlPlane
from zhooks.grad import ReduceHook
from zhooks.run import Runtime
from zhooks.unit import Unit


class Controlled:
    """The verbs of an attachment over parts of a model."""

    model: nn.Module
    _runtime: Runtime
    _comm: Comm
    _units: list[Unit]

    def _check_attached(self, verb: str) -> None:
        """Raise AttachError once the model is detached."""
        raise NotImplementedError

    def unshard(self, module: nn.Module | None = None) -> None:
        """Gather the units of ``module`` and keep them gathered until ``reshard``.  Collective.

        Full units are gathered, even if ``module`` is only a part of one.  After an optimizer step the next use gathers it
        again.  Budgets do not count what stays gathered.

        Args:
            module: a module of the attached model; None means all of it.
        Raises:
            AttachError: ``module`` has no attached parameters; on every rank.
        """
        self._runtime.unshard(self._units_of("unshard", module))

    def apply(self, policy: Any = None, *, mesh: DeviceMesh | None = None) -> None:
        """As ``Changeable``."""
        raise NotImplementedError

    def reshard(self, module: nn.Module | DeviceMesh | None = None) -> None:
        """Release the units of ``module``, including those the policy would keep until backward, which then gathers them again.

        Given a DeviceMesh, move the model to that mesh instead, as ``apply(mesh=mesh)`` does.  Collective.

        Args:
            module: a module of the attached model, None for all of it, or a mesh.
        Raises:
            AttachError: ``module`` has no attached parameters; on every rank.  For a mesh see ``apply``.
        """
        if isinstance(module, DeviceMesh):
            self.apply(mesh=module)
            return
        self._runtime.reshard(self._units_of("reshard", module))

    def _units_of(self, verb: str, module: nn.Module | None) -> list[Unit]:
        """The units that hold parameters of a module.  Collective."""
        self._check_attached(verb)
        if module is None:
            return list(self._units)
        with ControlPlane(self._comm.stage, verb).all_or_none():
            if not isinstance(module, nn.Module):
                raise AttachError(
                    f"{verb} expected a module of the attached model, found {type(module).__name__}. Pass the module itself."
                )
            wanted = {id(param) for param in tree.parameters(module)}
            found = [unit for unit in self._units if any(id(param) in wanted for flat in unit.flats for param in flat.params)]
            if not found:
                raise AttachError(
                    f"{verb} expected a module with attached parameters, found {type(module).__name__} with none. Pass a "
                    "module of the attached model that [units] ignore does not name."
                )
        return found

    def register_reduce_hook(
        self, *, before: ReduceHook | None = None, after: ReduceHook | None = None
    ) -> RemovableHandle:
        """Call functions at every reduction of gradients in backward, until the returned handle is removed.

        Both are called as ``hook(unit, gradient)`` with the name of a flat buffer and a 1-D tensor, which they may change in
        place.

        Args:
            before: receives what this rank sends: its sum of the full buffer in the reduce dtype, before division and, with a
                loss scale, still scaled.  A buffer above ``[comm] buffer`` comes in chunks.
            after: receives what this rank keeps of the result, divided and unscaled: its range, or all of it at stage 0.
        Returns:
            A handle with ``remove()``.
        Raises:
            AttachError: neither is a function.
        """
        self._check_attached("register_reduce_hook")
        if (before is None and after is None) or not all(hook is None or callable(hook) for hook in (before, after)):
            raise AttachError(
                f"register_reduce_hook expected before or after to be functions of a unit's name and a tensor, found "
                f"{type(before).__name__} and {type(after).__name__}. Pass at least one."
            )
        return self._runtime.reducer.hooks.register(before, after)
