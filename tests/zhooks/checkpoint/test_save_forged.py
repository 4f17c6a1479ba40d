"""Checkpoints that were changed by hand, checksums included: a load takes all of one, or refuses it and changes nothing.

pytest runs it, on two ranks: one rank's file is forged, and both must agree.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zhooks
from offload.shards import Entry, ShardReader, ShardWriter, read_manifest, shard_name
from tests.support.inside import checksum_of
from tests.support.json_damage import mutate, places
from tests.support.on_ranks import folder, from_first, on_ranks, place
from tests.support.resuming import Run, stir
from tests.support.slow import slow
from tests.support.torches import Muon
from tests.support.values import sharded

POLICY = {"stage": 3, "units": {"min_numel": 0}, "precision": {"param": "fp16", "loss_scale": "dynamic", "initial_scale": 8}}
WRONG: tuple[Any, ...] = ("remove", None, "text", -1, 2.5, 10**6, [], {}, [[1]], {"tuple": ["a"]}, True)
Change = Callable[[dict[str, Any], dict[str, Tensor], dict[str, Any]], None]


def forge(good: Path, bad: Path, rank: int, change: Change) -> None:
    """A copy whose file of ``rank`` is changed: its document, its tensors by name, and what the manifest is about."""
    shutil.copytree(good, bad, dirs_exist_ok=True)
    manifest = read_manifest(good)
    reader = ShardReader(good, manifest.files[rank])
    tensors = {name: reader.tensor(name) for name in reader.entries}
    reader.close()
    document = json.loads(bytes(tensors.pop("document").numpy()))
    content = manifest.model_dump()
    change(document, tensors, content["about"])
    tensors["document"] = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    (bad / shard_name(rank)).unlink()
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    writer = ShardWriter(bad / shard_name(rank), entries)
    for name, value in tensors.items():
        writer.write(name, [value])
    content["files"][rank] = writer.finish().model_dump()
    raw = json.dumps({"checksum": checksum_of(content), "manifest": content})
    (bad / "manifest.json").write_text(raw)


def everything(run: Run) -> list[Any]:
    """All that a load may change, on this rank, as plain data."""
    params = list(run.model.parameters())
    grads = [None if param.grad is None else sharded(param.grad).to_local() for param in params]
    states = [sorted(run.optimizer.state.get(param, {}).items()) for param in params]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in run.optimizer.param_groups]
    generators = [torch.get_rng_state(), random.getstate(), numpy.random.get_state(legacy=False)]
    held = [[sharded(param).to_local() for param in params], list(run.model.buffers()), grads, states, groups, generators]
    return copy.deepcopy(plain([*held, run.scheduler.state_dict(), run.attachment.loss_scale]))


def plain(value: Any) -> Any:
    if isinstance(value, zhooks.ShardedTensor):
        value = value.to_local()
    if isinstance(value, (Tensor, numpy.ndarray)):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def in_document(at: tuple[Any, ...], new: Any) -> Change:
    return lambda document, tensors, about: mutate(document, at, copy.deepcopy(new))


def of_document(document: dict[str, Any]) -> Iterator[tuple[str, Change]]:
    """Each value of the document, of rows the first and the last, as something else."""
    for number, at in enumerate(places(document)):
        rows = [(key, len(_at(document, at[:depth]))) for depth, key in enumerate(at) if isinstance(key, int)]
        if any(0 < key < length - 1 and length > 2 for key, length in rows):
            continue
        # Every place meets one wrong value and every wrong value many places, without all pairs of both.
        new = WRONG[number * 7 % len(WRONG)]
        yield f"{at} as {new!r}", in_document(at, new)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def of_tensors(names: list[str], generator: str) -> Iterator[tuple[str, Change]]:
    """Each tensor in another dtype, of another shape, or gone; and random states that no generator was in."""
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "bytes": lambda value: value.reshape(-1).view(torch.uint8) if value.dtype != torch.uint8 else value.view(torch.int8),
        "half": lambda value: value.reshape(-1)[: value.numel() // 2],
        "whole numbers": lambda value: value.to(torch.int32),
    }
    for number, name in enumerate(names):
        for way in list(ways)[number % 3 :] if name != generator else ways:
            yield f"{name} as {way}", lambda d, t, a, name=name, way=way: t.update({name: ways[way](t[name])})  # type: ignore[misc]
        yield f"no {name}", lambda d, t, a, name=name: t.pop(name)  # type: ignore[misc]
    for byte in (0, 1, 255):
        yield f"random state of {byte}", lambda d, t, a, byte=byte: t[generator].fill_(byte)  # type: ignore[misc]


def of_manifest() -> Iterator[tuple[str, Change]]:
    for key in ("scale", "good_steps", "overflows_left"):
        values: tuple[Any, ...] = ("2", None, float("nan"), [], -1.0, "remove")
        for new in values:
            yield f"{key} as {new!r}", lambda d, t, about, key=key, new=new: mutate(about["loss_scale"], (key,), new)  # type: ignore[misc]


def outcome(run: Run, path: Path) -> str:
    try:
        run.load(path)
    except zhooks.CheckpointError as error:
        return str(error)
    return ""


@on_ranks(2, limit_s=400.0, part=("tensors", *slow("document")), every=(3, *slow(1)))
def test_a_forged_checkpoint_loads_whole_or_changes_nothing_on_any_rank(part: str, every: int) -> None:
    run = Run(POLICY)
    run.train(range(2))
    with folder() as path:
        run.save(path / "good", extra={"step": 1})
        reader = ShardReader(path / "good", read_manifest(path / "good").files[1])
        document = json.loads(bytes(reader.tensor("document").numpy()))
        names = [name for name in reader.entries if name != "document"]
        reader.close()
        generator = next(item[1]["tensor"] for item in document["rng"]["dict"] if item[0] == "torch")
        wanted = everything(run)[0]
        run.train(range(2, 3))
        stir()
        forged = [*of_document(document)] if part == "document" else [*of_tensors(names, generator), *of_manifest()]
        refused, partly = 0, []
        for name, change in forged[::every]:
            if place()[0] == 0:
                forge(path / "good", path / "bad", 1, change)
            from_first(None)
            before = everything(run)
            problem = outcome(run, path / "bad")
            said: list[Any] = [None, None]
            dist.all_gather_object(said, (problem, everything(run) == before if problem else everything(run)[0] == wanted))
            if said[0][0] != said[1][0] or not (said[0][1] and said[1][1]):
                partly.append((name, said))
            refused += bool(problem)
            if not problem:
                run.load(path / "good")
                stir()
        assert not partly, partly[:12]
        assert refused > 30 // every, refused
        run.load(path / "good")
        run.train(range(2, 4))


@on_ranks(2, fresh=(True, False))
def test_a_state_of_a_whole_matrix_in_another_dtype_is_refused_on_every_rank(fresh: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    attachment, optimizer = zhooks.attach(model, policy={"stage": 3}), Muon(model.parameters())
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()

    def narrow(document: dict[str, Any], tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        name = next(name for name, value in tensors.items() if name.startswith("tree/") and value.is_floating_point())
        tensors[name] = tensors[name].to(torch.bfloat16)

    with folder() as path:
        attachment.save(path / "good", optimizer)
        if place()[0] == 0:
            forge(path / "good", path / "bad", 0, narrow)
        from_first(None)
        other = Muon(model.parameters()) if fresh else optimizer
        with pytest.raises(zhooks.CheckpointError, match=r"Muon's momentum_buffer in torch\.\w+, .* found torch\.\w+"):
            attachment.load(path / "bad", other)
        attachment.load(path / "good", other)


@pytest.mark.parametrize("state", [None, [], {}, {"torch": 1, "python": 2, "cuda": []}])
def test_random_states_of_another_kind_are_refused(state: Any) -> None:
    from zhooks.rng import check

    with pytest.raises(zhooks.CheckpointError, match="load expected"):
        check(state, [torch.device("cpu")])


RENAMES = {"step": "steps", "exp_avg": "average"}


@on_ranks(2, was=tuple(RENAMES), stepped=(False, True))
def test_states_under_names_that_the_optimizer_does_not_ask_for_are_refused(was: str, stepped: bool) -> None:
    """A converter may call them so, with checksums that are right: torch would raise a KeyError in the next step."""

    def rename(document: dict[str, Any], tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
        for one in document["optimizers"]:
            for _, _, entry in one["entries"]:
                for pair in entry:
                    pair[0] = RENAMES[was] if pair[0] == was else pair[0]
        for row in document["states"]:
            if row[2] == was:
                row[2], row[3] = RENAMES[was], row[3].replace(f"/{was}/", f"/{RENAMES[was]}/")
        for name in [name for name in tensors if f"/{was}/" in name]:
            tensors[name.replace(f"/{was}/", f"/{RENAMES[was]}/")] = tensors.pop(name)

    run = Run({"stage": 3, "units": {"min_numel": 0}})
    run.train(range(1))
    with folder() as path:
        run.save(path / "good")
        if place()[0] == 0:
            forge(path / "good", path / "half", 0, rename)
            forge(path / "half", path / "bad", 1, rename)
        dist.barrier()
        again = Run({"stage": 3, "units": {"min_numel": 0}}, seed=5)
        again.train(range(int(stepped)))
        before = everything(again)
        with pytest.raises(zhooks.CheckpointError, match=rf"AdamW's states of each parameter .* \(KeyError: '{was}'\)"):
            again.load(path / "bad")
        assert everything(again) == before
        again.load(path / "good")
        again.train(range(1, 2))
