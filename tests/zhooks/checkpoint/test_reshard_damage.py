"""Folders of two ranks that were damaged or forged, loaded by one: each is refused by name, or loaded as it was saved.

pytest runs it; two ranks save the folder once, and this process loads it again and again. What is forged has right checksums,
so that nothing but the contents can say what is wrong. Each is changed at one place.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, nn

import zhooks
from tests.support.inside import checksum_of
from tests.support.json_damage import mutate, places
from tests.support.ranks import Pool

WRONG: tuple[Any, ...] = ("remove", None, "text", "float16", "I32", -1, 0, 1, 2, 2.5, 10**6, 2**63, [], {}, [[1]], True, False)
CODES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F64": 8, "U8": 1, "I8": 1, "BOOL": 1, "I64": 8}


class Net(nn.Module):
    """Two units, one of parameters that ranks cut, and a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def trained(seed: int) -> tuple[Net, zhooks.Attachment, torch.optim.Optimizer]:
    """A step, and gradients that are held."""
    torch.manual_seed(seed)
    model = Net()
    attachment = zhooks.attach(model, policy={"stage": 3, "units": {"min_numel": 0}})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 5)).square().mean().backward()
        if not optimizer.state:
            optimizer.step()
            optimizer.zero_grad()
    model.count.fill_(seed + 1)
    return model, attachment, optimizer


def saves(path: str) -> None:
    _, attachment, optimizer = trained(0)
    attachment.save(f"{path}/run", optimizer, extra={"step": 1})


Part = tuple[str, list[int], bytes]


class Damaged:
    """The folder's bytes as they were saved, and as one change makes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = ["manifest.json", *sorted(file.name for file in path.glob("*.safetensors"))]
        self.raw = {name: (path / name).read_bytes() for name in self.names}
        self.content = json.loads(self.raw["manifest.json"])["manifest"]

    def write(self, changed: dict[str, bytes]) -> None:
        for name in self.names:
            (self.path / name).write_bytes(changed.get(name, self.raw[name]))

    def manifest(self, content: Any) -> dict[str, bytes]:
        return {"manifest.json": json.dumps({"checksum": checksum_of(content), "manifest": content}).encode()}

    def tensors(self, rank: int) -> dict[str, Part]:
        raw = self.raw[self.names[1 + rank]]
        begin = 8 + struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8:begin])
        header.pop("__metadata__")
        spans = {name: [begin + at for at in about["data_offsets"]] for name, about in header.items()}
        return {name: (one["dtype"], one["shape"], raw[slice(*spans[name])]) for name, one in header.items()}

    def forged(self, rank: int, tensors: dict[str, Part]) -> dict[str, bytes]:
        """A file of these tensors, and the manifest that describes it."""
        header: dict[str, Any] = {}
        at = 0
        for name, (dtype, shape, raw) in tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
            at += len(raw)
        head = json.dumps(header).encode()
        begin = struct.pack("<Q", len(head)) + head
        raw = begin + b"".join(part for _, _, part in tensors.values())
        content = copy.deepcopy(self.content)
        digests = {name: xxhash.xxh3_64_hexdigest(part) for name, (_, _, part) in tensors.items()}
        record = {"nbytes": len(raw), "header": xxhash.xxh3_64_hexdigest(begin), "tensors": digests}
        content["files"][rank] |= record
        return {self.names[1 + rank]: raw} | self.manifest(content)


def in_bytes(damaged: Damaged, rng: random.Random) -> tuple[str, dict[str, bytes]]:
    """A file's bytes: one other, some lost, some more, the end, or all."""
    name = rng.choice(damaged.names)
    raw = damaged.raw[name]
    at, length = rng.randrange(len(raw)), rng.choice((1, 8, 300))
    ways = {
        "another byte": raw[:at] + bytes([raw[at] ^ rng.randrange(1, 256)]) + raw[at + 1 :],
        "bytes lost": raw[:at] + raw[at + length :],
        "bytes more": raw[:at] + rng.randbytes(length) + raw[at:],
        "an early end": raw[:at],
        "zeros": raw[:at] + bytes(len(raw[at : at + length])) + raw[at + length :],
    }
    way = rng.choice(list(ways))
    return f"{name}: {way} at {at}", {name: ways[way]}


def in_manifest(damaged: Damaged, rng: random.Random) -> tuple[str, dict[str, bytes]]:
    content = copy.deepcopy(damaged.content)
    at, new = rng.choice(places(content)), rng.choice(WRONG)
    mutate(content, at, copy.deepcopy(new))
    return f"manifest {at} as {new!r}", damaged.manifest(content)


def in_document(damaged: Damaged, rng: random.Random) -> tuple[str, dict[str, bytes]]:
    rank = rng.randrange(2)
    tensors = damaged.tensors(rank)
    document = json.loads(tensors["document"][2])
    # Of long rows (random states) a few places are as good as all.
    every = [at for at in places(document) if not any(type(key) is int and key > 8 for key in at)]
    at, new = rng.choice(every), rng.choice(WRONG)
    mutate(document, at, copy.deepcopy(new))
    raw = json.dumps(document).encode()
    return f"document of {rank} {at} as {new!r}", damaged.forged(rank, tensors | {"document": ("U8", [len(raw)], raw)})


def in_tensors(damaged: Damaged, rng: random.Random) -> tuple[str, dict[str, bytes]]:
    """A tensor of another dtype, another shape, shorter, longer, gone, or by another name."""
    rank = rng.randrange(2)
    tensors = damaged.tensors(rank)
    name = rng.choice(list(tensors))
    dtype, shape, raw = tensors.pop(name)
    code = rng.choice([code for code, size in CODES.items() if code != dtype and len(raw) % size == 0] or ["BOOL"])
    size = len(raw) // CODES[dtype]
    ways: dict[str, dict[str, Part]] = {
        f"{code}": {name: (code, [len(raw) // CODES[code]], raw)},
        f"{code}, its shape kept": {name: (code, shape, bytes(CODES[code] * size))},
        "another shape": {name: (dtype, [1, *shape], raw)},
        "half": {name: (dtype, [size // 2], raw[: size // 2 * CODES[dtype]])},
        "twice": {name: (dtype, [2 * size], raw + raw)},
        "nothing": {},
        "another name": {name + "x": (dtype, shape, raw)},
    }
    way = rng.choice(list(ways))
    return f"{name} of {rank} as {way}", damaged.forged(rank, tensors | ways[way])


KINDS: list[Callable[[Damaged, random.Random], tuple[str, dict[str, bytes]]]] = [in_bytes, in_manifest, in_document, in_tensors]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Values, gradients and states, copied."""
    found: list[Tensor] = [*model.buffers()]
    for param in model.parameters():
        found += [param, *([] if param.grad is None else [param.grad])]
        found += [value for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor) and value.dim()]
    return [(one.to_local() if isinstance(one, zhooks.ShardedTensor) else one).detach().clone() for one in found]


def alike(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_what_was_changed_is_refused_by_name_or_loaded_as_it_was_saved(
    ranks: Callable[[int], Pool], tmp_path: Path, count: int
) -> None:
    ranks(2).run(f"{__name__}:saves", path=str(tmp_path))
    damaged = Damaged(tmp_path / "run")
    model, attachment, optimizer = trained(1)
    before = held(model, optimizer)
    attachment.save(tmp_path / "before", optimizer)
    attachment.load(tmp_path / "run", optimizer)
    wanted = held(model, optimizer)
    attachment.load(tmp_path / "before", optimizer)
    wrong: list[str] = []
    refused = loaded = 0
    for number in range(count):
        name, changed = KINDS[number % len(KINDS)](damaged, random.Random(number))
        damaged.write(changed)
        try:
            attachment.load(tmp_path / "run", optimizer)
        except zhooks.CheckpointError as error:
            refused += 1
            if "expected" not in str(error).lower() or "\n" in str(error) or not alike(held(model, optimizer), before):
                wrong.append(f"{number} {name}: changed something, {error}")
        else:
            loaded += 1
            if not alike(held(model, optimizer), wanted):
                wrong.append(f"{number} {name}: loaded otherwise")
            attachment.load(tmp_path / "before", optimizer)
    assert not wrong, (len(wrong), wrong[:12])
    assert loaded > count // 50 and refused > count // 2, (loaded, refused)
