"""Tensors of every layout in memory and every dtype of safetensors, as buffers and in ``extra``: saved, and loaded bit for bit.

pytest runs it, on one and two ranks.  What torch refuses to write to is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zhooks
from tests.support.on_ranks import folder, on_ranks, place
from tests.support.values import full


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def pairs(*shape: int) -> Tensor:
    return torch.complex(numbers(*shape), 2 * numbers(*shape))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "one element, strided": lambda: numbers(4, 2)[:1, 0],
    "one element, two dims": lambda: numbers(4, 2)[:1, :1],
    "no element, strided": lambda: numbers(4, 2)[:0, 0],
    "transposed": lambda: numbers(4, 3).t(),
    "a column": lambda: numbers(4, 3)[:, 1],
    "by rows of three dims": lambda: numbers(2, 3, 4).permute(1, 2, 0),
    "channels last": lambda: numbers(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "a number": lambda: numbers(4)[2],
    "imaginary": lambda: pairs(3).imag,
    "imaginary, one element": lambda: pairs(1).imag,
    "imaginary of a conjugate": lambda: pairs(3).conj().imag,
    "imaginary of a conjugate, one element": lambda: pairs(1).conj().imag,
    "conjugate": lambda: pairs(3).conj(),
    "conjugate, one element": lambda: pairs(1).conj(),
    "bf16, one element": lambda: numbers(4, 2).bfloat16()[:1, 1],
    "int64, one element": lambda: torch.arange(8).view(4, 2)[:1, 1],
}
CODED = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "uint16", "uint32", "uint64")
DTYPES: dict[str, Callable[[], Tensor]] = {
    name: lambda name=name: torch.ones(3).to(getattr(torch, name)) for name in CODED  # type: ignore[misc]
}


class Net(nn.Module):
    def __init__(self, made: dict[str, Callable[[], Tensor]], seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(4, 4)
        for number, make in enumerate(made.values()):
            self.register_buffer(f"buffer{number}", make())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made


def equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, whatever their layout in memory."""
    found = [each.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format) for each in (one, other)]
    same = (found[0].dtype, found[0].shape) == (found[1].dtype, found[1].shape)
    return same and found[0].untyped_storage().tolist() == found[1].untyped_storage().tolist()


def zeroed(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.copy_(torch.zeros(buffer.shape).to(buffer.dtype))


@on_ranks(1, 2, transport=("auto", "p2p"))
def test_buffers_of_any_layout_and_dtype_are_saved_and_loaded(transport: str) -> None:
    made = LAYOUTS | DTYPES
    wanted = [make() for make in made.values()]
    model = Net(made)
    attachment = zhooks.attach(model, policy={"stage": 3} | ({"comm": {"transport": transport}} if place()[1] > 1 else {}))
    assert all(map(equal, model.buffers(), wanted))
    extra = {name: make() for name, make in made.items()}
    with folder() as path:
        attachment.save(path / "run", (), extra=extra)
        attachment.save(path / "beside", (), extra=extra, wait=False).wait()
        attachment.save_full(path / "model.safetensors")
        written = load_file(path / "model.safetensors")
        assert all(equal(written[f"buffer{number}"], value) for number, value in enumerate(wanted))
        for name in ("run", "beside"):
            zeroed(model)
            loaded = attachment.load(path / name, ())
            assert all(map(equal, model.buffers(), wanted)) and all(map(equal, loaded.values(), extra.values()))


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


#: What torch itself refuses to load into.
UNWRITABLE = {"expanded": lambda: numbers(1).expand(4), "rows": lambda: numbers(3, 1).expand(3, 4), "inference": inference}


@on_ranks(1, 2, kind=tuple(UNWRITABLE), verb=("load", "load_state_dict"))
def test_a_buffer_that_cannot_be_written_to_is_refused_before_anything_is_loaded(kind: str, verb: str) -> None:
    made = {"before": lambda: torch.zeros(2), kind: UNWRITABLE[kind]}
    attachment = zhooks.attach(Net(made), policy={"stage": 3})
    with folder() as path:
        attachment.save(path / "run", ())
        state = attachment.state_dict()
        model = Net(made, seed=1)
        again = zhooks.attach(model, policy={"stage": 3})
        with torch.no_grad():
            model.get_buffer("buffer0").fill_(7)
        before = full(model)
        with pytest.raises(zhooks.CheckpointError, match=r"buffers and parameters that can be written to, found buffer1"):
            again.load(path / "run", ()) if verb == "load" else again.load_state_dict(state)
        assert all(map(equal, full(model), before)) and model.get_buffer("buffer0").tolist() == [7, 7]


@pytest.mark.parametrize("give", ["array", "meta", "sparse"])
def test_a_state_of_other_things_than_dense_tensors_is_refused_before_anything_is_loaded(give: str) -> None:
    kinds: dict[str, Callable[[Tensor], Any]] = {
        "array": Tensor.numpy, "meta": lambda value: value.to("meta"), "sparse": Tensor.to_sparse
    }  # fmt: skip
    model = Net({})
    attachment = zhooks.attach(model)
    state = {name: kinds[give](value) for name, value in Net({}, seed=1).state_dict().items()}
    with pytest.raises(zhooks.CheckpointError, match=r"found 2 not plain dense tensors \(layer\.weight, layer\.bias\)"):
        attachment.load_state_dict({"model": state})
    assert all(map(equal, full(model), Net({}).parameters()))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_states_that_exceed_a_budget_are_refused_before_anything_is_loaded(tier: str, tmp_path: Path) -> None:
    def run(seed: int, **policy: Any) -> tuple[Any, zhooks.Attachment, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        attachment = zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}, **policy})
        return model, attachment, torch.optim.AdamW(model.parameters())

    model, attachment, optimizer = run(0)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    attachment.save(tmp_path / "run", optimizer)
    small = {"optimizer": {"tier": tier}, "budget": {tier: "100KiB"}, "disk": {"path": str(tmp_path / "scratch")}}
    model, attachment, optimizer = run(1, **small)
    before = full(model)
    with pytest.raises(zhooks.CheckpointError, match=rf"memory for the optimizer's states on their tiers, found: {tier} tier"):
        attachment.load(tmp_path / "run", optimizer)
    assert all(map(equal, full(model), before)) and not optimizer.state


@on_ranks(2)
def test_save_full_follows_a_link_as_save_does() -> None:
    attachment = zhooks.attach(Net({}))
    with folder() as path:
        if place()[0] == 0:
            (path / "real").mkdir()
            (path / "link.safetensors").symlink_to(path / "real" / "model.safetensors")
        attachment.save_full(path / "link.safetensors")
        attachment.save_full(path / "link.safetensors")
        assert (path / "link.safetensors").is_symlink()
        assert [each.name for each in (path / "real").iterdir()] == ["model.safetensors"]
        assert load_file(path / "link.safetensors").keys() == {"layer.weight", "layer.bias"}


def test_save_full_replaces_nothing_but_a_file(tmp_path: Path) -> None:
    attachment = zhooks.attach(Net({}))
    with pytest.raises(zhooks.CheckpointError, match=r"^Cannot write .*. Expected a file or no such path, found a folder"):
        attachment.save_full(tmp_path)
    with pytest.raises(zhooks.CheckpointError, match=r"^save_full expected the path of a file, found 3\. Name one, e\.g\."):
        attachment.save_full(3)  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(zhooks.CheckpointError, match=r"^Cannot store wide. Expected a dtype that .*, found torch\.c"):
        zhooks.attach(model).save_full(tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []
