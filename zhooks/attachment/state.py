"""What an attachment does with its state as a whole: full values, state dicts and checkpoints.

``Attachment`` is one of these.  It hands each verb to the package that does it, once nothing of a backward is open; it never
decides what a state consists of.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.errors import AttachError, CheckpointError
from offload.events import Bus
from offload.policy import Policy
from offload.text import shown, shown_path
from zhooks import checkpoint, tree
from zhooks.attachment.spans import spanned
from zhooks.build import Tiers
from zhooks.comm import Comm, ControlPlane
from zhooks.layout import Ignored
from zhooks.optim import Optimizers, Rounding, Steps, holders
from zhooks.plan import check_holds
from zhooks.run import Runtime
from zhooks.unit import Unit


class Stateful:
    """The verbs of an attachment that read or write its whole state."""

    model: nn.Module
    policy: Policy
    _units: list[Unit]
    _runtime: Runtime
    _comm: Comm
    _bus: Bus
    _known: tuple[torch.optim.Optimizer, ...]
    _tiers: Tiers
    _rounding: Rounding
    _optimizers: Optimizers
    _undo: ExitStack | None
    _ignored: Ignored
    _steps: Steps
    _check_whole: Callable[[str], None]
    _check_reload: Callable[[str, Sequence[torch.optim.Optimizer]], None]
    _loaded: Callable[[], None]
    _saving: checkpoint.Saving | None = None
    #: A move to another policy or mesh ended half way, and could not be taken back.
    _torn: bool = False
    #: Whose checkpoints later ones replace; a run that is resumed is the one that it loads.
    _run: str = ""
    #: When the last checkpoint that the run knows of was saved; on the first rank.
    _newest_ns: int = 0

    def _check_attached(self, verb: str) -> None:
        """What the attachment knew of the model is over once it is detached, and would be read or written in vain."""
        if self._undo is None:
            raise AttachError(
                f"{verb} expected an attached model, found one that was detached already. To go on training, attach it again."
            )
        if self._torn:
            raise AttachError(
                f"{verb} expected a model under one policy on one mesh, found one whose change to another failed halfway, "
                "because ranks or tiers failed. Load the last checkpoint in new processes."
            )

    def _check_at_rest(self, verb: str) -> None:
        """What reads or writes values comes after the step that early updates were made for, too."""
        self._check_attached(verb)
        if verb not in ("load", "resume"):
            self._check_whole(verb)
        self._runtime.conclude()
        self._runtime.reducer.updates_due(verb)

    @contextmanager
    def gathered(self, *parameters: Tensor, write: bool = False) -> Iterator[list[Tensor]]:
        """Yield the full plain values of ``parameters``, or of all parameters, inside the block.  Collective.

        Inside the block, modules have them as attributes too.  Every rank must pass the same parameters.

        Args:
            *parameters: parameters of the attached model.
            write: copy rank 0's changes back to every shard at the end.
        Yields:
            Plain tensors of the parameters' own shapes and dtypes (the masters', not that of compute), on the model's device,
            in the order of ``parameters``.
        Raises:
            CheckpointError: a parameter belongs to another model, or, with ``write``, is in ``[units] ignore``.
        """
        self._check_at_rest("gathered")
        with checkpoint.gathered(
            self._units, self._runtime, self._comm, parameters or tuple(tree.parameters(self.model)), write, self._ignored
        ) as full:
            yield full

    @spanned("state_dict")
    def state_dict(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
        """Return the full state on rank 0's CPU, and {} on the other ranks.  Collective.

        It has the keys "model" ({name: tensor}, which the plain model loads), "optimizer" if one is known, and "loss_scale" if
        the policy has one.  Parameters that are ``left_out`` are listed under "left_out", by name and checksum.  It is gathered
        unit by unit.

        Args:
            optimizer: whose states to add; None means the one given to ``attach``.
        Returns:
            Full tensors on rank 0.
        """
        self._check_at_rest("state_dict")
        self._runtime.finish_backward()
        self._check_optimizers(optimizer, "state_dict")
        chosen = optimizer or next(iter(self._known), None)
        if chosen is not None:
            # What torch loaded into it and no step has met yet is ranges of this layout, too.
            self._optimizers.meet(chosen, "state_dict")
        state = checkpoint.full_state(self.model, self._units, self._comm, chosen, self._ignored)
        return {**state, **self._runtime.scaling.saved()} if state else state

    @spanned("load_state_dict")
    def load_state_dict(self, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what ``state_dict`` returned, on any number of ranks.  Collective.

        Args:
            state: rank 0's is used; other ranks may pass {}.  Without "optimizer" the optimizer stays as it is.
            optimizer: as in ``state_dict``.
        Raises:
            CheckpointError: the state is of another model or optimizer; nothing has changed.
        """
        self._check_at_rest("load_state_dict")
        self._runtime.finish_backward()
        self._check_optimizers(optimizer, "load_state_dict")
        chosen = optimizer or next(iter(self._known), None)
        if chosen is not None:
            self._optimizers.choose_owners(chosen, "load_state_dict")
        with self._steps.changing("load_state_dict"):
            checkpoint.load_full_state(
                self.model, self._units, self._comm, state, chosen, self._runtime.scaling.checked, self._ignored
            )
        if chosen is not None:
            self._optimizers.admit(chosen)

    def loss_scale_state(self) -> dict[str, Any]:
        """The loss scale and its counters as plain data, the same on every rank; {} if the policy sets none."""
        return self._runtime.scaling.saved()

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``loss_scale_state`` returned.

        Args:
            state: the same on every rank; {} changes nothing.
        Raises:
            CheckpointError: ``state`` is something else; the scale is as it was.
        """
        self._check_at_rest("load_loss_scale_state")
        self._runtime.scaling.checked(state)()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of frozen parameters of tensor subclasses (a quantized base): whole on every rank, saved as checksums."""
        return tuple(self._ignored.frozen)

    @spanned("save_full")
    def save_full(self, path: str | Path) -> None:
        """Write full parameters and buffers to one safetensors file, from rank 0.  Collective.

        One parameter is in memory at a time.

        Args:
            path: the file; an existing one, or the one that a link leads to, is replaced once the new one is complete.
        Raises:
            CheckpointError: the file cannot be written.
        """
        self._check_at_rest("save_full")
        self._runtime.finish_backward()
        checkpoint.save_full(self.model, self._units, self._comm, self._bus, path, self._ignored)

    @spanned("save_pretrained")
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        tokenizer: Any = None,
        max_shard_size: int | str = "5GB",
        dtype: torch.dtype | str | None = None,
    ) -> None:
        """Write a folder that transformers' ``from_pretrained`` reads, or one of PEFT adapters.  Collective.

        Each rank writes a share of the files, with one full unit in memory at a time.  The folder is renamed into place once
        everything is on disk.  An earlier folder of the same kind stays until then; other files in it are kept.

        Args:
            folder: on a file system that all hosts share; absent, empty, or an earlier folder of a model (or of adapters).
            tokenizer: anything with ``save_pretrained``, such as a tokenizer or processor; rank 0's is written.
            max_shard_size: the largest size of a file, as in transformers; a larger tensor gets its own file.
            dtype: "fp32", "bf16", "fp16" or a torch dtype for the parameters, except those that transformers keeps in fp32;
                None writes the masters unchanged.
        Raises:
            CheckpointError: on every rank.  The model is not one of transformers or PEFT, is quantized or split into pipeline
                stages, a value would become infinite in ``dtype``, or writing failed.  Nothing was committed.
        """
        self._check_at_rest("save_pretrained")
        asked = checkpoint.Pretrained(folder, tokenizer, max_shard_size, dtype)
        checkpoint.save_pretrained(
            self.model, self._units, self._comm, self._bus, self._ignored, asked, lambda some: self.gathered(*some)
        )

    @spanned("save")
    def save(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        keep: int | None = None,
    ) -> checkpoint.Saving:
        """Write everything this run needs to resume; each rank writes its own shards, from any tier.  Collective.

        The new checkpoint is renamed to ``folder`` once every rank has written and synced its file; an earlier checkpoint there
        can be loaded until then.  It contains parameters, accumulated gradients, optimizer states and options, buffers, random
        states (torch, Python, NumPy, stochastic rounding) and the loss scale.  Nothing is pickled.

        Args:
            folder: on a file system that all hosts share; absent, empty, or an earlier checkpoint.
            optimizer: one, several, or () for none; None means the one given to ``attach``, else all that hold parameters.
            objects: anything with ``state_dict`` and ``load_state_dict`` (a scheduler, a scaler), by name.
            extra: plain data and tensors that ``load`` will return, such as the step.
            wait: False returns as soon as there is a snapshot of the current state (copied to host memory; state on disk is not
                copied), and a thread writes it while training continues.  The next save, load or detach, and the end of the
                program, wait for it.  ``[save]`` limits the memory.
            keep: how many of the checkpoints that this run saved with ``keep`` to leave, this one included.  Older ones in the
                same parent folder whose names differ only in the last number are removed once this one is committed.
        Returns:
            The save, finished or still running: see ``done``, ``progress`` and ``wait()``.
        Raises:
            CheckpointError: on every rank, naming the first that failed; nothing was committed.  Also if an earlier background
                save failed and this was not reported yet; then nothing was tried.
        """
        self._check_at_rest("save")
        ranks = ControlPlane(self._comm.stage, "save", shown_path(folder))
        self._check_save(ranks, wait, keep)
        self._finish_saving("save")
        self._runtime.due()
        chosen = self._chosen("save", optimizer)
        live = ranks.run(lambda: self._live("save", chosen, objects, extra))
        for each in live.optimizers:
            # What torch loaded into it and no step has met yet is saved as ranges, too.
            self._optimizers.meet(each, "save")
        self._run = self._run or ranks.on_first(lambda: secrets.token_hex(8))
        series = checkpoint.Series(self._run, keep, self._newest_ns)
        if wait:
            saving = checkpoint.save(live, folder, extra or {}, series, self._tiers.store)
        else:
            patience_s = self.policy.comm.timeout_s
            saving = self._saving = checkpoint.save_beside(live, folder, extra or {}, series, self._snapshot, patience_s)
        self._newest_ns = max(self._newest_ns + 1, saving.begun_ns)
        return saving

    def _check_save(self, ranks: ControlPlane, wait: Any, keep: Any) -> None:
        """What ranks must agree on before anything.  Collective."""
        refuse = self.policy.save.while_saving == "refuse"

        def check() -> None:
            if not isinstance(wait, bool):
                raise CheckpointError(f"save expected wait=True or False, found {shown(wait)}. Pass one of them.")
            if keep is not None and (type(keep) is not int or keep < 1):
                raise CheckpointError(f"save expected keep to be None or at least 1, found {shown(keep)}. Pass one of these.")
            if refuse and self._saving is not None and not self._saving.done:
                raise CheckpointError(
                    f"save expected the save to {shown_path(self._saving.folder)} to be finished, found it at "
                    f"{self._saving.progress.written} of {self._saving.progress.total} bytes. Save later, or set [save] "
                    'while_saving = "wait".'
                )

        ranks.run(check)
        if not ranks.agree(f"{wait} {keep}"):
            raise CheckpointError("save expected the same wait and keep on every rank, found different ones. Pass the same.")

    def _finish_saving(self, verb: str) -> None:
        """Wait for the save that goes on beside training.  Collective where there is one.

        Raises:
            CheckpointError: it failed, and nobody was told; once.
        """
        saving, self._saving = self._saving, None
        if saving is not None and not saving.concluded:
            try:
                saving.wait()
            except CheckpointError as error:
                raise CheckpointError(
                    f"{verb} expected the background save to {shown_path(saving.folder)} to succeed, found: {error} "
                    f"This call did nothing; {verb} again."
                ) from error

    def _snapshot(self, tensors: Sequence[Any]) -> checkpoint.Snapshot:
        store = self._tiers.store
        memory = checkpoint.SnapshotMemory.of(self.policy, store, self._bus, self._comm.alike)
        return checkpoint.Snapshot(tensors, store, memory)

    @spanned("load")
    def load(
        self,
        folder: str | Path | Sequence[str | Path],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Resume from what ``save`` wrote, with the same model.  Collective.

        Ranks, mesh and policy may differ from those that saved: each rank reads the ranges it owns.  Every file is verified
        before anything is changed.  Optimizer states that do not exist yet are created.  Folders written by DeepSpeed (ZeRO 1
        to 3, universal) are accepted: masters, states and options are loaded, and the client state is returned.

        Args:
            folder: one folder, or a list with those of all stages of a pipeline that was split differently; parameters are
                found by name.
            optimizer: as in ``save``; () loads only the model and leaves optimizers as they are.
            objects: as in ``save``; {} ignores those in the file.
        Returns:
            What was saved as ``extra``.
        Raises:
            CheckpointError: on every rank; the run is unchanged unless the message says that it is partly loaded.  Also if
                optimizer states were saved and there is no optimizer yet.
        """
        self._check_at_rest("load")
        self._finish_saving("load")
        self._runtime.due()
        live = self._to_load(ControlPlane(self._comm.stage, "load", shown_path(folder)), "load", optimizer, objects)
        with self._steps.changing("load"):
            extra = checkpoint.load(live, folder)
        self._loaded()
        self._resume([folder] if isinstance(folder, (str, Path)) else list(folder))
        for each in live.optimizers:
            self._optimizers.admit(each)
        return extra

    def _resume(self, folders: Sequence[str | Path]) -> None:
        """Go on as the run that saved, whose checkpoints later ones may replace; of several folders as none.  Collective."""
        ranks = ControlPlane(self._comm.stage, "load", shown_path(folders[0]))
        targets = [checkpoint.destination(each, "load") for each in folders] if ranks.first else []
        self._run = ranks.on_first(lambda: (checkpoint.run_of(targets[0]) or "") if len(targets) == 1 else "")
        # What is saved from now on is newer, whatever the clocks of hosts say.
        self._newest_ns = max([self._newest_ns, *map(checkpoint.when_saved, targets)])

    def _check_optimizers(self, optimizer: Any, verb: str) -> None:
        given = () if optimizer is None else (optimizer,)
        ControlPlane(self._comm.stage, verb, "the optimizer").run(lambda: check_holds(given, self.model, verb))

    def _chosen(self, verb: str, optimizer: Any) -> tuple[Any, ...]:
        """What is given, or else meant.  Collective where that is not known from ``attach``."""
        if optimizer is not None:
            return tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        chosen = tuple(self._known or self._optimizers.every(verb))
        if self._ignored:
            ControlPlane(self._comm.stage, verb, "optimizers").run(lambda: self._check_ignored(verb, chosen))
        return chosen

    def _check_ignored(self, verb: str, chosen: Sequence[torch.optim.Optimizer]) -> None:
        """Which optimizers of ignored parameters are meant is not for us to guess, nor to leave out."""
        states = [one.state for one in chosen]
        others = [one for one in holders(list(self._ignored.params.values())) if all(one.state is not each for each in states)]
        if others:
            raise CheckpointError(
                f"{verb} expected to be told which optimizers to include, found {type(others[0]).__name__} with parameters "
                "that are in [units] ignore. Pass all of them: optimizer=[...], or () for none."
            )

    def _to_load(
        self, ranks: ControlPlane, verb: str, optimizer: Any, objects: Mapping[str, Any] | None
    ) -> checkpoint.RunState:
        """The run that is loaded into; with ``optimizer`` () its model alone.  Collective."""
        chosen = self._chosen(verb, optimizer)
        self._check_reload(verb, chosen)
        model_only = optimizer is not None and not chosen
        return ranks.run(lambda: replace(self._live(verb, chosen, objects), model_only=model_only))

    def _live(
        self, verb: str, optimizers: tuple[Any, ...], objects: Mapping[str, Any] | None, extra: Mapping[str, Any] | None = None
    ) -> checkpoint.RunState:
        checkpoint.check_handed(verb, objects, extra)
        check_holds(optimizers, self.model, verb)

        about = {"stage": self.policy.stage, "table": dict(self.policy.table())}
        reducer = self._runtime.reducer
        return checkpoint.RunState(
            self.model, self._units, self._comm, reducer, self._bus, optimizers, objects, about, self._runtime.scaling,
            partial(self._tiers.adopt, optimizers), self._tiers.check_room, self._rounding, self._ignored,
        )
