"""The state of a run as a whole: state dicts and checkpoints, for the methods of an ``Attachment``."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from offload.errors import CheckpointError, DivergenceError
from offload.shards import Series, destination, run_of, when_saved
from offload.text import shown, shown_path
from zhooks import checkpoint
from zhooks.comm import ControlPlane
from zhooks.optim import holders
from zhooks.plan import check_holds
from zhooks.session.session import Session

__all__ = [
    "chosen_optimizers",
    "finish_saving",
    "load_full",
    "load_run",
    "name_run",
    "run_to_load",
    "run_to_save",
    "save_run",
    "take_full",
]

#: What a verb is given as optimizers.
Given = Optimizer | Sequence[Optimizer] | None


def take_full(session: Session, optimizer: Optimizer | None) -> dict[str, Any]:
    """See ``Attachment.state_dict``.  Collective."""
    with session.verb("state_dict"):
        chosen = _one(session, "state_dict", optimizer)
        if chosen is not None:
            # What torch loaded into it and no step has met yet is ranges of this layout, too.
            session.optimizers.meet(chosen, "state_dict")
        state = checkpoint.full_state(session.model, session.units, session.comm, chosen, session.ignored)
        return {**state, **session.runtime.scaling.saved()} if state else state


def load_full(session: Session, state: dict[str, Any], optimizer: Optimizer | None) -> None:
    """See ``Attachment.load_state_dict``.  Collective."""
    with session.verb("load_state_dict"):
        chosen = _one(session, "load_state_dict", optimizer)
        if chosen is not None:
            session.optimizers.choose_owners(chosen, "load_state_dict")
        scaling = session.runtime.scaling
        with session.steps.changing("load_state_dict"):
            checkpoint.load_full_state(session.model, session.units, session.comm, state, chosen, scaling, session.ignored)
        if chosen is not None:
            session.optimizers.admit(chosen)


def _one(session: Session, verb: str, optimizer: Optimizer | None) -> Optimizer | None:
    """The optimizer that is meant, if any.  Collective."""
    given = () if optimizer is None else (optimizer,)
    ControlPlane(session.comm.stage, verb, "the optimizer").run(lambda: check_holds(given, session.model, verb))
    return optimizer or next(iter(session.known), None)


def save_run(
    session: Session,
    folder: str | Path,
    optimizer: Given,
    objects: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
    wait: bool,
    keep: int | None,
) -> checkpoint.Saving:
    """See ``Attachment.save``.  Collective."""
    with session.verb("save"):
        ranks = ControlPlane(session.comm.stage, "save", shown_path(folder))
        ranks.run(lambda: _check_save(session, wait, keep))
        if not ranks.agree(f"{wait} {keep}"):
            raise CheckpointError("save expected the same wait and keep on every rank, found different ones. Pass the same.")
        finish_saving(session, "save")
        run = run_to_save(session, ranks, "save", optimizer, objects, extra)
        name_run(session, ranks)
        series, store, background = Series(session.run, keep, session.newest_ns), session.tiers.store, None
        if not wait:
            memory: list[checkpoint.SnapshotMemory] = []
            bounded = session.policy, store, session.bus, session.comm.alike
            ranks.run(lambda: memory.append(checkpoint.SnapshotMemory.of(*bounded)))
            background = memory[0], session.policy.comm.timeout_s
        saving = checkpoint.save(run, folder, extra or {}, series, store, background)
        if not wait:
            session.saving = saving
        session.newest_ns = max(session.newest_ns + 1, saving.begun_ns)
        return saving


def _check_save(session: Session, wait: Any, keep: Any) -> None:
    saving = session.saving
    if not isinstance(wait, bool):
        raise CheckpointError(f"save expected wait=True or False, found {shown(wait)}. Pass one of them.")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise CheckpointError(f"save expected keep to be None or at least 1, found {shown(keep)}. Pass one of these.")
    if session.policy.save.while_saving == "refuse" and saving is not None and not saving.done:
        raise CheckpointError(
            f"save expected the save to {shown_path(saving.folder)} to be finished, found it at {saving.progress.written} of "
            f'{saving.progress.total} bytes. Save later, or set [save] while_saving = "wait".'
        )


def run_to_save(
    session: Session,
    ranks: ControlPlane,
    verb: str,
    optimizer: Given,
    objects: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
) -> checkpoint.RunState:
    """The run, for a verb that saves it: gradients are reduced, and optimizers known on every rank.  Collective."""
    session.runtime.due()
    chosen = chosen_optimizers(session, verb, optimizer)
    run = ranks.run(lambda: session.run_state(verb, chosen, objects, extra))
    for each in run.optimizers:
        # What torch loaded into it and no step has met yet is saved as ranges, too.
        session.optimizers.meet(each, verb)
    return run


def name_run(session: Session, ranks: ControlPlane) -> None:
    """Give the run a name, if it has none yet.  Collective."""
    session.run = session.run or ranks.on_first(lambda: secrets.token_hex(8))


def finish_saving(session: Session, verb: str) -> None:
    """Wait for the background save.  Collective if there is one.

    Raises:
        CheckpointError: it failed, and nobody was told; once.
    """
    saving, session.saving = session.saving, None
    if saving is not None and not saving.concluded:
        try:
            saving.wait()
        except CheckpointError as error:
            raise CheckpointError(
                f"{verb} expected the background save to {shown_path(saving.folder)} to succeed, found: {error} "
                f"This call did nothing; {verb} again."
            ) from error


def load_run(
    session: Session, folder: str | Path | Sequence[str | Path], optimizer: Given, objects: Mapping[str, Any] | None
) -> dict[str, Any]:
    """See ``Attachment.load``.  Collective."""
    with session.verb("load", whole=False):
        finish_saving(session, "load")
        session.runtime.due()
        run = run_to_load(session, ControlPlane(session.comm.stage, "load", shown_path(folder)), "load", optimizer, objects)
        with session.steps.changing("load"):
            extra = checkpoint.load(run, folder)
        session.loaded()
        folders = [folder] if isinstance(folder, (str, Path)) else list(folder)
        ranks = ControlPlane(session.comm.stage, "load", shown_path(folders[0]))
        targets = [destination(each, "load") for each in folders] if ranks.first else []
        # The run goes on as the one that saved, whose checkpoints later ones may replace; of several folders as none.
        session.run = ranks.on_first(lambda: (run_of(targets[0]) or "") if len(targets) == 1 else "")
        # What is saved from now on is newer, whatever the clocks of hosts say.
        session.newest_ns = max([session.newest_ns, *map(when_saved, targets)])
        for each in run.optimizers:
            session.optimizers.admit(each)
        return extra


def run_to_load(
    session: Session, ranks: ControlPlane, verb: str, optimizer: Given, objects: Mapping[str, Any] | None
) -> checkpoint.RunState:
    """The run that is loaded into; with ``optimizer`` () its model alone.  Collective.

    Raises:
        DivergenceError: ranks are at different steps, and an optimizer that has stepped would stay as it is; on every rank.
    """
    chosen = chosen_optimizers(session, verb, optimizer)
    if session.apart and any(all(one is not each for each in chosen) for one in session.optimizers.here()):
        raise DivergenceError(
            f"{verb} expected all optimizers that have stepped, because ranks are at different steps, found that some are "
            "missing. Pass all of them."
        )
    model_only = optimizer is not None and not chosen
    return ranks.run(lambda: replace(session.run_state(verb, chosen, objects), model_only=model_only))


def chosen_optimizers(session: Session, verb: str, optimizer: Given) -> tuple[Any, ...]:
    """What is given, or else meant.  Collective if that is not known from ``attach``."""
    if optimizer is not None:
        return tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    chosen = tuple(session.known or session.optimizers.every(verb))
    if session.ignored:
        ControlPlane(session.comm.stage, verb, "optimizers").run(lambda: _check_ignored(session, verb, chosen))
    return chosen


def _check_ignored(session: Session, verb: str, chosen: Sequence[Optimizer]) -> None:
    """Which optimizers of ignored parameters are meant is not for us to guess, nor to leave out."""
    states = [one.state for one in chosen]
    found = holders(list(session.ignored.params.values()))
    others = [one for one in found if all(one.state is not each for each in states)]
    if others:
        raise CheckpointError(
            f"{verb} expected to be told which optimizers to include, found {type(others[0]).__name__} with parameters "
            "that are in [units] ignore. Pass all of them: optimizer=[...], or () for none."
        )
