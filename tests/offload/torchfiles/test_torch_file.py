"""Files of torch.save, read as torch.load reads them, and files that were made to harm: nothing that a pickle names is run."""

from __future__ import annotations

import os
import pickle
import random
import struct
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.torchfiles import Made, PickleError, Stored, TorchFile, interpret, plain

STREAM = {"_use_new_zipfile_serialization": False}


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    return {
        "base": base, "view": base[1:3], "turned": base.t(), "half": base.half(), "narrow": base.bfloat16()[:, 1:3],
        "ints": torch.arange(5), "flags": torch.tensor([True, False]), "number": torch.tensor(2.5), "none": torch.empty(0, 3),
        "param": torch.nn.Parameter(base), "nested": OrderedDict(a=[1, 2.5, None, (True, "x")], b={3: base[0]}), "big": 2**70,
        "raw": b"\0\xff",
    }  # fmt: skip


def read(value: Any) -> Any:
    return plain(value, lambda found: found.tensor() if isinstance(found, Stored) else found)


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


@pytest.mark.parametrize("how", [{}, STREAM, {"pickle_protocol": 4}], ids=["archive", "stream", "protocol 4"])
def test_what_torch_saved_is_read_whole_and_by_ranges(tmp_path: Path, how: dict[str, Any]) -> None:
    torch.save(state(), tmp_path / "a.pt", **how)
    file = TorchFile(tmp_path / "a.pt")
    found = read(file.root)
    assert alike(found, state())
    for name, tensor in state().items():
        if isinstance(tensor, Tensor) and tensor.numel() > 3:
            assert torch.equal(file.root[name].elements(1, 2), tensor.reshape(-1)[1:3]), name


class Calls:
    """Pickled as a call of ``what``."""

    def __init__(self, what: Any, *args: Any) -> None:
        self.call = what, args

    def __reduce__(self) -> Any:
        return self.call


def touched(path: Path) -> list[Any]:
    """Objects that make a file when they are unpickled."""
    text = f"open({str(path)!r}, 'w').close()"
    return [
        Calls(os.system, f"touch {path}"), Calls(eval, text), Calls(exec, text), Calls(os.mkdir, str(path)),
        Calls(pickle.loads, pickle.dumps(Calls(os.mkdir, str(path)))), Calls(torch.hub.load, str(path), "x"),
        Calls(os.open, str(path), os.O_CREAT),
    ]  # fmt: skip


@pytest.mark.parametrize("how", [{}, STREAM], ids=["archive", "stream"])
@pytest.mark.parametrize("number", range(7))
def test_nothing_that_a_pickle_names_is_run(tmp_path: Path, number: int, how: dict[str, Any]) -> None:
    marker, path = tmp_path / "ran", tmp_path / "a.pt"
    torch.save({"evil": touched(marker)[number], "tensor": torch.ones(3)}, path, **how)
    file = TorchFile(path)
    assert not marker.exists()
    assert isinstance(file.root["evil"], Made)
    assert "was not read" in repr(file.root["evil"])
    assert torch.equal(file.root["tensor"].tensor(), torch.ones(3))
    assert not marker.exists()


def test_chains_of_calls_are_refused(tmp_path: Path) -> None:
    # getattr(os, "system")("touch ..."): what is called has no name of its own.
    raw = b"cbuiltins\ngetattr\n(cos\nfoo\nX\x06\x00\x00\x00systemtR(X\x01\x00\x00\x00xtR."
    with pytest.raises(PickleError, match="a call of something without a name"):
        interpret(raw, {})


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\x80\x02ios\nsystem\n.", "the instruction b'i'"), (b"\x80\x02(cos\nsystem\no.", "the instruction b'o'"),
        (b"\x80\x02P1\n.", "the instruction b'P'"), (b"\x80\x02\x82\x01.", "the instruction b'.x82'"),
        (b"\x80\x02(.", "IndexError"), (b"\x80\x02K\x01", "EOFError"), (b"\x80\x02.", "IndexError"),
        (b"\x80\x02}K\x01)\x86s.", "IndexError"), (b"\x80\x02]}s.", "IndexError"), (b"\x80\x02h\x05.", "Memo value not found"),
        (b"\x80\x02K\x01}b.", "attributes of a int"), (b"\x80\x02}]K\x01s.", "a list as a key"),
        (b"\x80\x02" + b")" + b"\x85" * 100000 + b"q\x00}h\x00K\x01s.", "tuple as a key"), (b"", "EOFError"),
        (b"garbage", "the instruction b'g'"),
    ],
)  # fmt: skip
def test_instructions_that_no_data_needs_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(PickleError, match=says):
        interpret(raw, {})


def test_a_memo_far_away_takes_no_memory() -> None:
    assert interpret(b"\x80\x02K\x07r\xff\xff\xff\x7fj\xff\xff\xff\x7f.", {}) == 7


def test_containers_without_end_are_refused_when_they_are_copied() -> None:
    with pytest.raises(PickleError, match="without end"):
        plain(interpret(b"\x80\x02]q\x00h\x00a.", {}))
    # Ten lists of ten lists of ...: a few bytes that stand for 10 ** 12 objects.
    raw = b"\x80\x02]q\x00"
    for level in range(12):
        raw += b"](" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 9 + b"eq" + bytes([level + 1])
    with pytest.raises(PickleError, match="without end"):
        plain(interpret(raw + b".", {}))


LONG = b"\x80\x02(" + b"N" * 100_000 + b"tq\x00"
DEEP = b"\x80\x02)" + b"\x85" * 200_000 + b"q\x00"
ROWS = b"\x80\x02]q\x00" + b"](h\x00h\x00eq\x00" * 60


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (LONG + b"ctorch\nSize\nq\x01](" + b"h\x01h\x00\x85R" * 1000 + b"e.", "copies without end"),
        (DEEP + b"ccollections\nOrderedDict\n](h\x00N\x86e\x85R.", "a tuple as a key"),
        (ROWS + b"ctorch._tensor\n_rebuild_from_type_v2\n(h\x00h\x00h\x00tR.", "a class without a name"),
    ],
    ids=["long rows", "a key to hash", "a text to make"],
)
def test_a_few_bytes_that_ask_for_endless_work_are_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", raw)
    with pytest.raises(CheckpointError, match=says):
        TorchFile(tmp_path / "a.pt")


def test_a_description_whose_checksum_does_not_match_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"lr": 0.25}, path)
    patched(path, struct.pack(">d", 0.25), struct.pack(">d", 0.75))
    with pytest.raises(CheckpointError, match=r"data\.pkl' whose checksum does not match"):
        TorchFile(path)


def patched(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert old in raw, f"{old!r} is not in the file"
    path.write_bytes(raw.replace(old, new))


def test_lengths_that_lie_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for shape, stride in [((2**40,), (1,)), ((2**31, 2**31), (0, 0)), ((3,), (2**50,)), ((-1,), (1,)), ((True,), (1,))]:
        torch.save({"tensor": torch.ones(3)}, path)
        about = TorchFile(path).root["tensor"]
        assert about.shape == (3,)
        evil = Calls(torch._utils._rebuild_tensor_v2, torch.ones(3).untyped_storage(), 0, shape, stride, False, OrderedDict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save({"tensor": evil}, path)
        with pytest.raises(CheckpointError, match="describes no tensors"):
            TorchFile(path)


def test_a_stream_whose_storage_is_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"tensor": torch.ones(300)}, path, **STREAM)
    patched(path, b"M,\x01N", b"J\xff\xff\xff\x7fN")
    with pytest.raises(CheckpointError, match=r"a\.pt. Expected a file that torch.save wrote"):
        TorchFile(path)
    torch.save({"tensor": torch.ones(300)}, path, **STREAM)
    patched(path, struct.pack("<q", 300), struct.pack("<q", 2**60))
    with pytest.raises(CheckpointError, match=r"a\.pt. Expected a file that torch.save wrote, found storage"):
        TorchFile(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "real.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    for name in ("link.pt", "pipe.pt", "folder.pt", "missing.pt"):
        with pytest.raises(CheckpointError, match=f"{name}. Expected a file that torch.save wrote"):
            TorchFile(tmp_path / name)


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"tensor": torch.ones(3)}, path)
    file = TorchFile(path)
    path.unlink()
    torch.save({"tensor": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="a file that was replaced"):
        file.root["tensor"].tensor()


def test_a_damaged_storage_of_an_archive_does_not_match_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"tensor": torch.full((64,), 3.0)}, path)
    patched(path, struct.pack("<2f", 3, 3) * 8, struct.pack("<2f", 3, 4) * 8)
    file = TorchFile(path)
    with pytest.raises(CheckpointError, match="whose checksum does not match"):
        file.verify(file.root["tensor"].record)


def damaged(path: Path, seed: int) -> None:
    """Change, remove or repeat some bytes."""
    dice, raw = random.Random(seed), bytearray(path.read_bytes())
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(raw))
        kind = dice.randrange(4)
        if kind == 0:
            del raw[at:]
        elif kind == 1:
            raw[at : at + dice.randint(1, 8)] = dice.randbytes(dice.randint(0, 8))
        else:
            raw[at] = dice.randrange(256)
        if not raw:
            break
    path.write_bytes(bytes(raw))


def mutations(path: Path, how: dict[str, Any], seeds: range) -> int:
    refused = 0
    small = {"weight": torch.randn(7, 3), "options": [{"lr": 0.1, "params": [0]}], "step": 3}
    for seed in seeds:
        torch.save(small, path, **how)
        damaged(path, seed)
        try:
            file = TorchFile(path)
            read(file.root)
        except (CheckpointError, PickleError):
            refused += 1
    return refused


@pytest.mark.parametrize("how", [{}, STREAM], ids=["archive", "stream"])
def test_damaged_files_are_refused_by_name_or_read(tmp_path: Path, how: dict[str, Any]) -> None:
    assert 30 < mutations(tmp_path / "a.pt", how, range(150)) < 150


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, STREAM], ids=["archive", "stream"])
def test_thousands_of_damaged_files_are_refused_by_name_or_read(tmp_path: Path, how: dict[str, Any]) -> None:
    assert 1000 < mutations(tmp_path / "a.pt", how, range(1000, 6000)) < 5000
