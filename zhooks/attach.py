"""``attach``: the one line that turns a model into a ZeRO model, and the Attachment it returns.

An Attachment is a facade: each method is a call into a package, with the session.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from offload.device import bus_of
from offload.errors import CapabilityError
from offload.events import Observer
from offload.policy import Policy
from offload.shards import remove_dead_jobs
from zhooks import tree
from zhooks.checkpoint import Pretrained, Saving, gathered, save_full, save_pretrained
from zhooks.comm import meet, open_comm
from zhooks.grad import ReduceHook
from zhooks.keywords import explained, explained_methods
from zhooks.plan import Request, make, read
from zhooks.run import batches
from zhooks.session import (
    CHOOSERS,
    Observation,
    Session,
    close_session,
    load_full,
    load_run,
    needed,
    open_session,
    save_run,
    take_full,
)
from zhooks.tensor import Overflow

if TYPE_CHECKING:
    from zhooks.report import Calibration, GradNorms, MemoryReport, NoiseScale
    from zhooks.resilience import Recovery

Batch = TypeVar("Batch")

_IN_PLACE = "attach changes the model in place, so keep using the model"


@explained
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: Policy | str | Path | dict[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    init: Callable[[nn.Module], None] | None = None,
    sync: bool = True,
) -> Attachment:
    """Train ``model`` with sharded parameters, gradients and optimizer states in an unchanged training loop.  Collective.

    Args:
        model: any module, on the device it will run on, or built under ``torch.device("meta")``.
        optimizer: only needed if it already holds state, which is then sharded too.
        policy: a path to a TOML or JSON file, a dict, a ``Policy``, or None for stage 3 with everything on the device.  "auto"
            chooses the placement that moves the least among those that fit this machine, and reconsiders after three steps;
            ``describe()`` says which was chosen, and why.
        mesh: a DeviceMesh over the whole process group with an axis ``shard`` (or ``dp``) and optionally ``replicate``, ``tp``
            and ``pp``.  Parameters that ``parallelize_module`` turned into DTensors over ``tp`` are sharded slice by slice.
            None shards over all ranks; without a process group there is one rank.
        init: called with each module of a model on meta, to initialize that module's own parameters and buffers.
        sync: broadcast rank 0's parameters and buffers.  False checks by hash that the ranks are already equal.
    Returns:
        The attachment of this model; its ``detach()`` undoes everything.
    Raises:
        PolicyError: the policy cannot be read.
        AttachError: the model, optimizer or mesh cannot be attached; the model is unchanged.
        BudgetError: the policy does not fit a budget or the machine; nothing was allocated.
        CapabilityError: the machine or the installed torch lacks what the policy asks for; the model is unchanged.

    An error on one rank is raised on every rank; the other ranks name the rank where it occurred.

    Source: ZeRO, arXiv:1910.02054; of the tiers ZeRO-Offload, arXiv:2101.06840, and ZeRO-Infinity, arXiv:2104.07857.
    """
    return attach_requested(lambda: read(model, optimizer, policy, mesh, init, sync))


def attach_requested(request: Callable[[], Request]) -> Attachment:
    """Attach what ``request`` returns; what it raises on one rank is raised on all.  Collective, but for ``request``."""
    meeting = meet()
    # What is trained later must not be made of inference tensors; the first of the two would turn gradients on.
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as span, ExitStack() as undo:
        try:
            asked = request()
            if asked.automatic and not CHOOSERS:
                raise CapabilityError('policy = "auto" needs the package zhooks.simulate. Import zhooks.')
        except Exception as error:
            # The others raise it where they compare settings.
            if meeting is not None:
                meeting.refuse(error)
            raise
        span.enter_context(bus_of(asked.device).verb("attach"))
        resilience = asked.policy.resilience
        remove_dead_jobs(Path(resilience.memory).expanduser(), resilience.job)
        comm = open_comm(asked.mesh, asked.policy, asked.device, asked.facts, meeting, asked.everywhere)
        undo.callback(comm.close)
        choice = CHOOSERS[0](asked, comm) if asked.automatic else None
        return Attachment(open_session(make(asked if choice is None else choice.request, comm), comm, undo, choice))


@explained_methods
class Attachment:
    """An attached model.  ``attach`` returns it, and ``detach`` ends it.

    Attributes:
        model: the module that was attached.
        policy: the current policy.
        rank: this process's rank in the process group.
        session: for zhooks' own packages and tests: what works on the model.  It may change in any version.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def model(self) -> nn.Module:
        return self.session.model

    @property
    def policy(self) -> Policy:
        return self.session.policy

    @property
    def rank(self) -> int:
        axis = self.session.comm.world.axis
        return int(axis.ranks[axis.rank])

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """For who takes it for a wrapper, as other libraries return one."""
        raise TypeError(f"Attachment: {_IN_PLACE}: model(...).")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            instead = f"; {_IN_PLACE}: model.{name}" if hasattr(nn.Module, name) else ""
            raise AttributeError(f"Attachment has no attribute {name}{instead}.", name=name, obj=self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients over the backward passes inside the block, as under DistributedDataParallel.

        At stages 0 and 1 the reduction is deferred to the first backward outside the block, or to the optimizer's step or a use
        of a gradient's values if that comes first, on every rank.  Clearing gradients (``zero_grad``, ``p.grad = None``) also
        clears what was accumulated, on this rank alone.  At stages 2 and 3, which shard gradients, each backward still reduces
        into the shards, to save memory; ``accumulate`` never does.
        """
        with self.session.attached("no_sync").runtime.unsynced():
            yield

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate the gradients of all backward passes inside the block on this rank, and reduce them once, at every stage.

        The reduction happens at the first read of a ``.grad`` outside a backward, at the optimizer's step, or at the end of the
        block, and must be the same event on every data-parallel rank.  A block left by an exception does not reduce until one
        of the other two.  Inside ``schedule.step`` of ``torch.distributed.pipelining`` this happens automatically.  It keeps a
        full gradient of the model in the reduce dtype.

        Raises:
            PolicyError: the policy updates parameters in backward (``[optimizer] overlap``).
        """
        with self.session.attached("accumulate").runtime.accumulating():
            yield

    def join(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over ``loader`` on ranks that have different numbers of batches: ``for batch in attachment.join(loader)``.

        A rank that has run out gets its last batch again until all ranks have run out, so the loop body, with its clipping,
        steps and schedulers, does not change.  Gradients of repeated batches count as zero, and means are over all ranks, as
        with DDP's ``Join``.  Anything else a repeated batch computes (a logged loss, running statistics) is not ignored: check
        ``idle``.  Collective at every batch.

        Args:
            loader: this rank's batches.
        Returns:
            The batches, then the last one again.
        """
        session = self.session.attached("join")

        def idle(now: bool) -> None:
            session.runtime.finish_backward()
            session.runtime.reducer.out_of_batches = now

        return batches(loader, session.comm.world, idle)

    @property
    def idle(self) -> bool:
        """Whether this rank has run out of batches inside ``join`` and is repeating its last one."""
        return self.session.runtime.reducer.out_of_batches

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
        return self.session.attached("register_reduce_hook").runtime.reducer.hooks.register(before, after)

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None if the policy sets no ``[precision] loss_scale``."""
        scaling = self.session.runtime.scaling
        return scaling.scale.value if scaling.on else None

    @property
    def overflows(self) -> tuple[Overflow, ...]:
        """The latest steps, at most 64 and oldest first, whose gradients overflowed under a loss scale or a GradScaler."""
        return self.session.runtime.scaling.overflows.latest

    def loss_scale_state(self) -> dict[str, Any]:
        """The loss scale and its counters as plain data, the same on every rank; {} if the policy sets none."""
        return self.session.runtime.scaling.saved()

    def load_loss_scale_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``loss_scale_state`` returned.

        Args:
            state: the same on every rank; {} changes nothing.
        Raises:
            CheckpointError: ``state`` is something else; the scale is as it was.
        """
        self.session.concluded("load_loss_scale_state").runtime.scaling.checked(state)()

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
        session = self.session.concluded("gathered")
        wanted = parameters or tuple(tree.parameters(session.model))
        with gathered(session.units, session.runtime, session.comm, wanted, write, session.ignored) as full:
            yield full

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Keep all units gathered inside the block, for generation and evaluation with many short forwards.  Collective.

        It takes the memory of all full parameters, which budgets do not count.
        """
        with self.session.attached("resident").runtime.resident():
            yield

    def unshard(self, module: nn.Module | None = None) -> None:
        """Gather the units of ``module`` and keep them gathered until ``reshard``.  Collective.

        Full units are gathered, even if ``module`` is only a part of one.  After an optimizer step the next use gathers it
        again.  Budgets do not count what stays gathered.

        Args:
            module: a module of the attached model; None means all of it.
        Raises:
            AttachError: ``module`` has no attached parameters; on every rank.
        """
        self.session.runtime.unshard(self.session.units_of("unshard", module))

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
        else:
            self.session.runtime.reshard(self.session.units_of("reshard", module))

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
        return take_full(self.session, optimizer)

    def load_state_dict(self, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Load what ``state_dict`` returned, on any number of ranks.  Collective.

        Args:
            state: rank 0's is used; other ranks may pass {}.  Without "optimizer" the optimizer stays as it is.
            optimizer: as in ``state_dict``.
        Raises:
            CheckpointError: the state is of another model or optimizer; nothing has changed.
        """
        load_full(self.session, state, optimizer)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of frozen parameters of tensor subclasses (a quantized base): whole on every rank, saved as checksums."""
        return tuple(self.session.ignored.frozen)

    def save(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        keep: int | None = None,
    ) -> Saving:
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
        return save_run(self.session, folder, optimizer, objects, extra, wait, keep)

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
        return load_run(self.session, folder, optimizer, objects)

    def save_full(self, path: str | Path) -> None:
        """Write full parameters and buffers to one safetensors file, from rank 0.  Collective.

        One parameter is in memory at a time.

        Args:
            path: the file; an existing one, or the one that a link leads to, is replaced once the new one is complete.
        Raises:
            CheckpointError: the file cannot be written.
        """
        with self.session.verb("save_full") as session:
            save_full(session.model, session.units, session.comm, session.bus, path, session.ignored)

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
        with self.session.verb("save_pretrained") as session:
            asked, full = Pretrained(folder, tokenizer, max_shard_size, dtype), lambda some: self.gathered(*some)
            save_pretrained(session.model, session.units, session.comm, session.bus, session.ignored, asked, full)

    def save_to_peers(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep what ``save`` would write in the memory of this rank's host, with a copy on the next host.  Collective.

        It outlives this process: after torchrun has restarted the ranks, any number of them can ``resume`` from it.  Each save
        replaces the previous one once it is complete.  ``[resilience]`` sets the number of copies, and where they are.

        Args:
            optimizer: as in ``save``.
            objects: as in ``save``.
            extra: as in ``save``.
        Raises:
            CheckpointError: on every rank; the previous save is unchanged.
        """
        with needed("resilience", "save_to_peers"):
            from zhooks.resilience import save_run_to_peers
        save_run_to_peers(self.session, optimizer, objects, extra)

    def resume(
        self,
        folders: str | Path | Sequence[str | Path] = (),
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Resume from the newest state that ``save_to_peers`` kept or that is in ``folders``.  Collective.

        Args:
            folders: checkpoints, or folders of checkpoints (as for ``zhooks.latest``), the same on every rank; they need not
                exist.
            optimizer: as in ``load``.
            objects: as in ``load``.
        Returns:
            What was saved as ``extra``; None if nothing was found, and the run starts from the beginning.
        Raises:
            CheckpointError: on every rank: the newest checkpoint in a folder is damaged, or is of another model.
        """
        with needed("resilience", "resume"):
            from zhooks.resilience import resume_run
        return resume_run(self.session, folders, optimizer, objects)

    def catch_preemption(self, signals: int | Iterable[int] = (signal.SIGTERM,)) -> None:
        """Catch ``signals`` until ``detach``: they set ``preempted`` instead of ending the process.  Collective.

        Call it before the loop, on every rank, in the main thread; calling it again with the same signals changes nothing.  A
        handler that the program had installed is still called, and is restored at ``detach``.

        Args:
            signals: which signals to catch: one, or several.
        Raises:
            AttachError: ``signals`` are not signals, or differ from those of another rank or of an earlier call, or this is not
                the main thread.  Raised on every rank, with no handler changed.
        """
        with needed("resilience", "catch_preemption"):
            from zhooks.resilience import catch_preemption
        catch_preemption(self.session, signals)

    @property
    def preempted(self) -> bool:
        """Whether a caught signal has reached any rank; the same answer on every rank.

        Every rank must read it at the same place.  After a backward that reduced gradients the answer is known; otherwise
        (after an evaluation, after micro-batches inside ``no_sync``, and over ``tp`` and ``pp``) the ranks exchange one byte.
        Collective.
        """
        with needed("resilience", "preempted"):
            from zhooks.resilience import preempted
        return preempted(self.session)

    def exit_if_preempted(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        objects: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        keep: int | None = None,
    ) -> None:
        """If ``preempted``, save and end this process with ``SystemExit(0)``; otherwise do nothing.  Collective.

        Call it at the end of the loop body, after schedulers and counters: the state at that moment is saved.  Signals that
        arrive during the save change nothing.

        Args:
            folder: as in ``save``.
            optimizer: as in ``save``.
            objects: as in ``save``.
            extra: as in ``save``, or a function that returns it.
            keep: as in ``save``.
        Raises:
            SystemExit: with code 0, on every rank, once the checkpoint is complete.
            CheckpointError: as ``save``; on every rank.
        """
        with needed("resilience", "exit_if_preempted"):
            from zhooks.resilience import exit_if_preempted
        exit_if_preempted(self.session, folder, optimizer, objects, extra, keep)

    def recover(self) -> Recovery:
        """Prepare to continue, or to save, after a ``DivergenceError``: a rank was late, or a connection failed.  Collective.

        Every rank calls it in ``except zhooks.DivergenceError:``, including the one that was late.  Unfinished work is
        dropped, transports are opened again, and the ranks compare which step they are at.  A rank that raised an error of its
        own calls it too; ranks wait for each other twice as long as usual here.  Then repeat the step from its first forward.
        If no rank had begun to update, the result is bit-identical to an undisturbed run, except that random states and
        running statistics are not rewound.

        Returns:
            What was found, and whether gradients were dropped.
        Raises:
            DivergenceError: a rank is gone, or does not come within twice ``[comm] timeout_s``.  Or the ranks are at different
                steps, or within one: then only ``load`` may come next.
            CapabilityError: parameters are not on the CPU, or a transport is no longer available.
        """
        with needed("resilience", "recover"):
            from zhooks.resilience import recover
        return recover(self.session)

    def memory(self, *, heads: int | None = None) -> MemoryReport:
        """Report the bytes this rank holds, by kind and tier, compared with the formulas.  ``print`` it for a table.

        Activations are counted from the first call on.

        Args:
            heads: the number of attention heads, if it cannot be found in the model's modules.
        Returns:
            The bytes held now, and the upper bound of each buffer.

        Source of the formulas: ZeRO, arXiv:1910.02054, sections 3 and 6.
        """
        with needed("report", "memory"):
            from zhooks.report import memory_report
        return memory_report(self.session, heads)

    def describe(self) -> str:
        """Describe the units as a table: parameters, elements, padding, dtypes and placement of each.

        After the first step it also shows how many bytes a step moves.
        """
        with needed("report", "describe"):
            from zhooks.report import describe
        return describe(self.session)

    def observe(self, observer: Observer) -> Observation:
        """Send the runtime's events to ``observer`` until the returned handle is closed.

        Args:
            observer: any object with a method ``on_event(event)``.  One that also has ``start`` and ``close``, such as
                ``zprof.Recorder``, is started here and closed with the handle.
        Returns:
            A handle with ``close()``; it is also a context manager.
        Raises:
            AttachError: ``observer`` has no ``on_event``.
        """
        return Observation(self.session.attached("observe").bus, observer)

    def payload(self) -> int | None:
        """Bytes that the gathers and reductions of one training step move, in full payloads; None before the first step."""
        return self.session.runtime.payload()

    def grad_norms(self) -> GradNorms:
        """Return the 2-norms of the gradients in ``.grad``: ``.total``, and ``.units`` by unit name.  Collective.

        These are the norms of the reduced means over the ranks, as clipping sees them: accumulated over the backward passes
        since ``zero_grad``, unscaled if the policy scales the loss, scaled as long as a GradScaler scales them, on any tier.
        It communicates one number per unit.  Gradients accumulated in ``accumulate()`` are reduced first.  On a mesh with
        ``pp`` they are those of this stage.

        Returns:
            Python floats, the same on every rank.
        Raises:
            ShardedOpError: the policy updates in backward (``[optimizer] overlap``), or a ``.grad`` was replaced.
            TierError: a tier cannot be read.
        """
        with needed("report", "grad_norms"):
            from zhooks.report import gradient_norms
        return gradient_norms(self.session)

    def noise_scale(self, batch_size: int, *, decay: float = 0.99) -> NoiseScale:
        """Measure the gradient noise scale, roughly the batch size beyond which more samples save few steps.  Collective.

        On several ranks it compares what each rank sends to a reduction with the mean that it receives.  A single rank needs
        several backward passes per step, after ``zero_grad()``.  The loss must be a mean over samples, with equally many on
        every rank and in every pass.  It costs one pass over the gradients and one exchange of five numbers per reduction.

        Args:
            batch_size: samples in one backward pass of one rank; the estimate is in the same unit.
            decay: of the running averages, from one reduction to the next; 1 weighs all alike.
        Returns:
            A handle that measures until it is closed; also a context manager.  ``estimate`` is the result so far.
        Raises:
            CapabilityError: the mesh has ``tp`` or ``pp``, or ``overlap`` is set on a single rank.
            ShardedOpError: another handle is open, or an argument is invalid or differs between ranks.

        Source: McCandlish et al., arXiv:1812.06162, appendix A.1.
        """
        with needed("report", "noise_scale"):
            from zhooks.report import measure_noise
        return measure_noise(self.session, batch_size, decay)

    @contextmanager
    def calibrate(
        self, *, prefer: Literal["bf16", "fp16"] = "bf16", loss_scale: float | None = None
    ) -> Iterator[Calibration]:
        """Measure a few ordinary steps inside the block and suggest a dtype for each unit.  Collective.

        Print the result for the reasons; ``.proposal.toml()`` and ``.proposal.values()`` are policies.

        Args:
            prefer: the dtype that units should compute in if they can; fp32 is proposed for the others.
            loss_scale: the scale at which fp16 is judged; None takes the largest one that the largest gradient allows.
        Yields:
            The calibration; it has a proposal once the block has ended.
        Raises:
            ShardedOpError: units do not compute in fp32, the policy updates in backward, or no backward was seen.
        """
        with needed("report", "calibrate"):
            from zhooks.report import calibrating
        with calibrating(self.session, prefer, loss_scale) as calibration:
            yield calibration


    def apply(self, policy: Policy | str | Path | dict[str, Any] | None = None, *, mesh: DeviceMesh | None = None) -> None:
        """Continue under another policy, or on another mesh, without a restart.  Collective.

        Call it between steps.  States move between tiers, and stage and precision may change; ``[units]`` and ``[comm]`` may
        not, nor ``[disk]`` and ``[host]`` once something is stored there.

        Args:
            policy: a complete policy: keys that are left out get their defaults.  None keeps the current one.
            mesh: the same ranks, arranged differently on ``replicate`` and ``shard``; None keeps the current mesh.  Collective
                over the process group, and waits for a background save.
        Raises:
            PolicyError: the policy cannot be read, differs between ranks, or changes what may not change.
            AttachError: a rule splits a module's parameters over dtypes, or the mesh differs between ranks, does not cover the
                process group, or has another ``tp`` or ``pp``; nothing has changed.
            BudgetError: a tier cannot hold what would move there; nothing has changed on any rank.
            TierError: a tier failed; everything was moved back on every rank.
            CheckpointError: a background save failed, or an optimizer's states cannot be sent; nothing has changed.
        """
        with needed("live", "apply"):
            from zhooks.live import apply
        apply(self.session, policy, mesh)

    def detach(self) -> nn.Module:
        """Restore the plain model, with full parameters, gradients and optimizer states and without hooks.  Collective.

        Returns:
            The model that was attached.
        Raises:
            AttachError: it is already detached.
            CheckpointError: a background save failed and this was not reported yet; call ``detach`` again.
            TierError: a tier cannot be read; what has been restored stays so, and ``detach`` may be called again.
        """
        return close_session(self.session)
