"""Constant-size buffers: what passes through them in pieces is what it was whole, and they do not grow with the model.

pytest runs it. Sizes are measured from real storages (``buffer_census.py``); the arithmetic of layouts is test_layout.py's.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import zhooks
from offload.errors import AttachError, PolicyError
from offload.events import Event
from tests.support.buffer_census import counted
from tests.support.inside import comm_of, flats_of, runtime_of
from tests.support.on_ranks import on_ranks, place
from tests.support.slow import slow
from tests.support.values import grad_of, sharded
from zhooks.comm import chunks_of, in_order, norms_of_runs, read
from zhooks.comm.control import COLLECT_NBYTES
from zhooks.layout import flat_layout
from zhooks.report.memory import buffers_of

SMALL = 4096
BF16 = {"precision": {"param": "bf16"}}
HOST = {what: {"tier": "host"} for what in ("parameter", "gradient", "optimizer")}
DISK = {what: {"tier": "disk"} for what in ("parameter", "gradient", "optimizer")}


class Mixed(nn.Module):
    """Parameters below and above the small bound: matrices, biases, and a convolution that lies channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 30)
        self.conv = nn.Conv2d(6, 31, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.up, self.down = nn.Linear(31, 77), nn.Linear(77, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        image = self.embedding(tokens).reshape(-1, 6, 5, 5).contiguous(memory_format=torch.channels_last)
        # Transposed and used twice: its gradient is a sum, and not contiguous.
        hidden = self.conv(image).mean((2, 3))
        return self.down((hidden @ self.up.weight.t() + self.up(hidden)).tanh())


def built(**policy: Any) -> tuple[Mixed, Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Mixed()
    attachment = zhooks.attach(model, policy={"units": {"min_numel": 1}, **policy})
    return model, attachment, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(model: nn.Module, attachment: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> dict[str, Tensor]:
    """Steps with accumulation, each rank on data of its own; full parameters and states afterwards, on every rank."""
    rank, _ = place()
    torch.manual_seed(1 + rank)
    batches = [torch.randint(0, 61, (2, 5)) for _ in range(2 * steps)]
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        with attachment.no_sync():
            model(first).square().mean().backward()
        model(second).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: full.clone() for (name, _), full in zip(model.named_parameters(), whole(attachment), strict=True)}
    for name, param in model.named_parameters():
        for key, state in optimizer.state[param].items():
            if hasattr(state, "full_tensor"):
                values[f"{name} {key}"] = state.full_tensor()
    return values


def whole(attachment: Any) -> list[Tensor]:
    with attachment.gathered() as values:
        return [value.clone() for value in values]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


def bounded(**policy: Any) -> dict[str, Any]:
    return {**policy, "comm": {"buffer": SMALL, **policy.get("comm", {})}}


def compare(**policy: Any) -> None:
    plain, cut = trained(*built(**policy)), built(**bounded(**policy))
    flats = flats_of(cut[1])
    assert sum(flat.long for flat in flats) >= 3
    assert all(flat.long or flat.layout.padded * flat.kind.wide <= SMALL for flat in flats)
    same(plain, trained(*cut))
    model = cut[1].detach()
    same(dict(model.named_parameters()), {name: plain[name] for name, _ in model.named_parameters()})


# ---- the same bits


@on_ranks(*slow(1), 2, *slow(4), half=(0, *slow(1)))
def test_a_small_bound_changes_no_bit_at_any_stage(half: int) -> None:
    """Each half has every stage and both dtypes."""
    for stage, dtypes in itertools.product((0, 1, 2, 3), ({}, BF16)):
        if (stage + bool(dtypes)) % 2 == half:
            compare(stage=stage, **dtypes)


@on_ranks(2)
def test_a_small_bound_changes_no_bit_on_tiers() -> None:
    compare(**HOST, **BF16)
    compare(stage=2, gradient={"tier": "host"})
    compare(**DISK)


@on_ranks(2)
def test_a_small_bound_changes_no_bit_over_messages_instead_of_memory() -> None:
    compare(comm={"transport": "p2p"}, **BF16)


@on_ranks(4)
def test_a_small_bound_changes_no_bit_over_replicas() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    ends = []
    for policy in ({}, bounded()):
        torch.manual_seed(0)
        model = Mixed()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        attachment = zhooks.attach(model, policy={"units": {"min_numel": 1}, **policy}, mesh=mesh)
        ends.append(trained(model, attachment, torch.optim.AdamW(model.parameters(), lr=0.01)))
    same(*ends)


@on_ranks(1, 2)
def test_hooks_and_autograd_grad_see_whole_gradients_of_a_parameter_in_pieces() -> None:
    seen: list[list[Tensor]] = []
    for policy in ({}, bounded()):
        model, attachment, _ = built(**policy)
        mine: list[Tensor] = []
        model.up.weight.register_hook(lambda grad: grad * 2)
        tokens = torch.arange(10).view(2, 5)
        model(tokens).sum().backward()
        mine.append(model.up.weight.grad.full_tensor())
        (grad,) = torch.autograd.grad(model(tokens).sum(), [model.conv.weight])
        mine.append(sharded(grad).full_tensor())
        model(tokens).sum().backward()  # is added to what is there
        mine.append(model.conv.weight.grad.full_tensor())
        seen.append(mine)
        attachment.detach()
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_a_parameter_in_pieces_that_only_one_rank_used_is_reduced() -> None:
    model, attachment, _ = built(**bounded())
    hidden = torch.ones(1, 31)
    rank, _ = place()
    loss = model(torch.arange(10).view(2, 5)).sum()
    if rank == 0:
        loss = loss + (hidden @ model.up.weight.t()).sum()
    loss.backward()
    plain = Mixed()
    attachment.detach()
    plain.load_state_dict(model.state_dict())
    plain(torch.arange(10).view(2, 5)).sum().backward()
    expected = grad_of(plain.up.weight) + 0.5
    torch.testing.assert_close(model.up.weight.grad, expected)


# ---- states that pass through


@on_ranks(1, 2)
def test_states_pass_through_in_pieces_and_arrive_whole() -> None:
    model, attachment, optimizer = built(**bounded())
    values = trained(model, attachment, optimizer)
    state = attachment.state_dict(optimizer)
    rank, _ = place()
    if rank == 0:
        same(state["model"], {name: values[name] for name, _ in model.named_parameters()})
        assert state["model"]["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    for param in model.parameters():
        with torch.no_grad():
            param.zero_()
    attachment.load_state_dict(state, optimizer)
    names = [name for name, _ in model.named_parameters()]
    same(dict(zip(names, whole(attachment), strict=True)), {name: values[name] for name in names})
    for name, param in model.named_parameters():
        assert torch.equal(optimizer.state[param]["exp_avg"].full_tensor(), values[f"{name} exp_avg"])


@on_ranks(2)
def test_save_full_and_save_write_a_parameter_in_pieces() -> None:
    import tempfile

    model, attachment, optimizer = built(**bounded())
    values = trained(model, attachment, optimizer)
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    attachment.save_full(folder / "full.safetensors")
    names = [name for name, _ in model.named_parameters()]
    same(load_file(folder / "full.safetensors"), {name: values[name] for name in names})
    attachment.save(folder / "run", optimizer)
    for param in model.parameters():
        with torch.no_grad():
            param.zero_()
    attachment.load(folder / "run", optimizer)
    same(dict(zip(names, whole(attachment), strict=True)), {name: values[name] for name in names})


# ---- what they hold


class Block(nn.Module):
    """A block of ``width``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


BOUND = 16 << 10


def measured(depth: int, width: int, **policy: Any) -> dict[str, int]:
    """Peak bytes of buffers on this rank: in a step with clipping, in a state dict, a save, a load and a detach."""
    import tempfile

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(depth)))
    fixed = {"units": {"min_numel": 0}, "comm": {"buffer": BOUND}, "schedule": {"reshard_after_forward": True}}
    attachment = zhooks.attach(model, policy={**fixed, **policy})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        model(torch.ones(2, width)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    peaks: dict[str, int] = {}
    with counted(attachment, optimizer) as census:
        step()
    peaks["step"] = census.peak
    asked = ("zhooks/unit/full_values.py:full_copies", "zhooks/checkpoint/full_optimizer_state.py:_shard")
    with counted(attachment, optimizer, results=asked) as census:
        state = attachment.state_dict(optimizer)
    peaks["state_dict"] = census.peak
    with counted(attachment, optimizer, results=asked) as census:
        attachment.load_state_dict(state, optimizer)
    peaks["load_state_dict"] = census.peak
    box = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    with counted(attachment, optimizer) as census:
        attachment.save_full(Path(box[0]) / "full.safetensors")
        attachment.save(Path(box[0]) / "run", optimizer)
    peaks["save"] = census.peak
    bounds = buffers_of(flats_of(attachment), runtime_of(attachment).reducer, comm_of(attachment))
    rings = bounds["message rings"].most
    assert peaks["step"] <= sum(kind.most for kind in bounds.values()) - rings + BOUND, (peaks, bounds)
    assert all(kind.now <= kind.most for kind in bounds.values())
    with counted(attachment, optimizer, results=asked) as census:
        attachment.detach()
    peaks["detach"] = census.peak
    return peaks


#: Numbers a parameter has in every step (its norm, whether it has a gradient) are no buffers of values.
SLACK = 16 << 10


def grows_by_nothing(**policy: Any) -> None:
    small, deep, wide = measured(3, 40, **policy), measured(30, 40, **policy), measured(3, 127, **policy)
    # Where every rank has all of everything, nothing but reductions needs a buffer.
    may_need_none = {"state_dict", "load_state_dict", "save", "detach"} if policy["stage"] == 0 else {"save"}
    # In a save each rank tells the first of every tensor it wrote: text, no values, in slices.
    told = min(COLLECT_NBYTES, 96 * 1024 * place()[1])
    for name, peak in small.items():
        assert peak > 0 or name in may_need_none, name
        assert deep[name] <= peak + (SLACK if name != "save" else told), (name, small, deep)
        assert wide[name] <= peak + SLACK, (name, small, wide)


@pytest.mark.slow
@on_ranks(2, limit_s=240.0)
def test_buffers_stay_what_they_are_when_the_model_grows_tenfold() -> None:
    grows_by_nothing(stage=3, **BF16)


@pytest.mark.slow
@on_ranks(2, 4, limit_s=300.0)
def test_buffers_stay_what_they_are_at_every_stage() -> None:
    for stage, dtypes in itertools.product((0, 1, 2, 3), ({}, BF16)):
        grows_by_nothing(stage=stage, **dtypes)


class Payload:
    """Bytes of reductions as they begin, and how many of them are open."""

    def __init__(self) -> None:
        self.nbytes = self.open = self.most = 0

    def on_event(self, event: Event) -> None:
        if event.what == "reduce" and event.kind in ("begin", "end"):
            self.open += 1 if event.kind == "begin" else -1
            self.most = max(self.most, self.open)
            self.nbytes += event.nbytes if event.kind == "begin" else 0


@on_ranks(2, stage=(0, 3))
def test_pieces_are_one_reduction_to_those_who_listen(stage: int) -> None:
    model, attachment, _ = built(**bounded(stage=stage))
    model(torch.arange(10).view(2, 5)).sum().backward()
    log = Payload()
    attachment.observe(log)
    model(torch.arange(10).view(2, 5)).sum().backward()
    assert log.open == 0
    assert log.most <= 2
    assert log.nbytes == runtime_of(attachment).reducer.payload()


# ---- bad input


@on_ranks(1, 2, 4)
def test_a_bound_below_one_aligned_row_is_refused_and_the_model_stays_plain() -> None:
    _, world = place()
    model = Mixed()
    before = {name: param.clone() for name, param in model.named_parameters()}
    row = 16 * world * 2  # bf16 elements, eight to 16 bytes, as fp32
    if row > 64:
        with pytest.raises(PolicyError, match=rf"\[comm\] buffer needs to hold one aligned row over {world} ranks, {row}"):
            zhooks.attach(model, policy={"comm": {"buffer": row - 1}, **BF16})
    same(dict(model.named_parameters()), before)
    zhooks.attach(model, policy={"comm": {"buffer": max(row, 64)}, "units": {"names": ["*"]}, **BF16})
    model(torch.arange(10).view(2, 5)).sum().backward()


def test_a_unit_cut_into_too_many_flats_is_refused_by_name() -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(300))
    with pytest.raises(AttachError, match=r"Expected at most 256 flat buffers, found more.*Raise \[comm\] buffer"):
        zhooks.attach(model, policy={"comm": {"buffer": 64}})


# ---- arithmetic


def test_pieces_cover_every_range_once() -> None:
    layout = flat_layout([1000, 37], world=3, itemsize=2, max_numel=400)
    found = torch.zeros(layout.padded, dtype=torch.int32)
    local: dict[int, list[int]] = {rank: [] for rank in range(3)}
    for piece in chunks_of(layout, 100, layout.align):
        assert piece.numel * 3 <= 100
        for rank, start in enumerate(piece.starts):
            found[start : start + piece.numel] += 1
            local[rank].extend(range(piece.local, piece.local + piece.numel))
    assert bool((found == 1).all())
    assert all(places == list(range(layout.shard_numel)) for places in local.values())


@pytest.mark.parametrize("like", ["contiguous", "transposed", "expanded", "channels last", "sliced"])
def test_any_run_of_any_tensor_is_read_in_the_order_of_its_memory(like: str) -> None:
    made = {
        "contiguous": torch.arange(60.0).view(3, 4, 5),
        "transposed": torch.arange(60.0).view(5, 4, 3).permute(2, 1, 0),
        "expanded": torch.arange(5.0).expand(3, 4, 5),
        "channels last": torch.arange(60.0).view(3, 4, 5),
        "sliced": torch.arange(120.0).view(3, 4, 10)[..., ::2],
    }[like]
    stride = (20, 1, 4) if like == "channels last" else (20, 5, 1)
    laid = torch.empty_strided((3, 4, 5), stride).copy_(made).as_strided((60,), (1,))
    for start, stop in itertools.combinations(range(0, 61, 7), 2):
        out = torch.ones(stop - start)
        read(in_order(made, stride), start, out)
        assert torch.equal(out, laid[start:stop])
        read(in_order(made, stride), start, out, add=True)
        assert torch.equal(out, 2 * laid[start:stop])


def test_norms_of_runs_combine_to_the_norm_of_all() -> None:
    values = torch.randn(1001).to(torch.bfloat16)
    norms = torch.stack(norms_of_runs(values, 2.0, 256))
    assert norms.numel() == 16
    torch.testing.assert_close(torch.linalg.vector_norm(norms), torch.linalg.vector_norm(values.float()))
