"""The example's data: which files it reads, how it splits them, and that a batch depends on its arguments alone."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.paths import ROOT


def load_text() -> ModuleType:
    """The example is a script's neighbour, not an installed module."""
    path = ROOT / "examples" / "text.py"
    spec = importlib.util.spec_from_file_location("examples_text", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["examples_text"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


text = load_text()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Sixty-four files of a hundred bytes each, the number of the file repeated."""
    for number in range(64):
        folder = tmp_path / f"package{number % 4}"
        folder.mkdir(exist_ok=True)
        (folder / f"module{number}.py").write_bytes(bytes([number]) * 100)
    return tmp_path


def test_sources_are_sorted_and_leave_out_packages_and_tests(tmp_path: Path) -> None:
    kept = ["a.py", "b/a.py", "b/z.py", "z.py"]
    for name in [*reversed(kept), "site-packages/x.py", "b/test/x.py", "tests/x.py", "b/data.txt", "__pycache__/y.py"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert text.find_sources(tmp_path) == kept


def test_every_file_is_in_exactly_one_part(library: Path) -> None:
    corpus = text.read_corpus(library, max_nbytes=1 << 20, min_nbytes=1)
    train, held_out = set(corpus.train.tolist()), set(corpus.held_out.tolist())
    assert train | held_out == set(range(64)) and not train & held_out
    assert (corpus.train_files, corpus.held_out_files) == (len(train), len(held_out))
    assert corpus.train.numel() + corpus.held_out.numel() == 6400


def test_a_new_file_moves_no_other_between_the_parts(library: Path) -> None:
    before = set(text.read_corpus(library, max_nbytes=1 << 20, min_nbytes=1).held_out.tolist())
    (library / "aaa.py").write_bytes(b"\xff" * 100)
    after = set(text.read_corpus(library, max_nbytes=1 << 20, min_nbytes=1).held_out.tolist())
    assert after - {255} == before


def test_no_more_bytes_are_read_than_allowed(library: Path) -> None:
    corpus = text.read_corpus(library, max_nbytes=4321, min_nbytes=0)
    assert corpus.train.numel() + corpus.held_out.numel() == 4321


def test_a_file_gives_no_more_than_its_own_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_FILE_NBYTES", 10)
    (tmp_path / "long.py").write_bytes(b"x" * 100)
    corpus = text.read_corpus(tmp_path, max_nbytes=1 << 20, min_nbytes=0)
    assert corpus.train.numel() + corpus.held_out.numel() == 10


def test_what_cannot_be_read_is_passed_over(library: Path) -> None:
    whole = text.read_corpus(library, max_nbytes=1 << 20, min_nbytes=1)
    (library / "broken.py").symlink_to(library / "nowhere.py")
    (library / "folder.py").mkdir()
    (library / "empty.py").touch()
    os.mkfifo(library / "pipe.py")
    again = text.read_corpus(library, max_nbytes=1 << 20, min_nbytes=1)
    assert torch.equal(whole.train, again.train) and torch.equal(whole.held_out, again.held_out)


def test_a_file_that_fails_to_open_is_passed_over(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refuse(self: Path, mode: str = "r") -> object:
        if self.name == "module7.py":
            raise PermissionError(13, "Permission denied")
        return opened(self, mode)

    monkeypatch.setattr(Path, "open", refuse)
    corpus = text.read_corpus(library, max_nbytes=1 << 20, min_nbytes=1)
    assert corpus.train_files + corpus.held_out_files == 63


def test_too_little_text_is_one_line_that_names_the_folder_and_the_mend(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("pass\n")
    with pytest.raises(text.CorpusError) as caught:
        text.read_corpus(tmp_path, max_nbytes=1 << 20, min_nbytes=1000)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}: ") and "at least 1,000 bytes" in message and "--source" in message
    assert "\n" not in message


def test_the_standard_library_is_enough_to_train_on() -> None:
    corpus = text.read_corpus(text.standard_library(), max_nbytes=16 << 20, min_nbytes=10_000)
    assert corpus.train.numel() > 10 * corpus.held_out.numel()


def test_targets_are_the_bytes_after_the_inputs() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    for inputs, targets in (
        text.train_batch(data, seed=0, step=0, rows=8, context=16),
        text.held_out_batch(data, rows=8, context=16),
    ):
        assert inputs.shape == targets.shape == (8, 16)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)


def test_a_train_batch_is_a_function_of_seed_and_step() -> None:
    data = torch.randint(256, (10_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def batch(seed: int, step: int) -> torch.Tensor:
        inputs: torch.Tensor = text.train_batch(data, seed=seed, step=step, rows=4, context=32)[0]
        return inputs

    first = batch(3, 5)
    torch.manual_seed(99)  # the global generator plays no part
    assert torch.equal(first, batch(3, 5))
    assert not torch.equal(first, batch(3, 6)) and not torch.equal(first, batch(4, 5))


def test_drawing_a_batch_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    text.train_batch(torch.zeros(100, dtype=torch.uint8), seed=0, step=0, rows=4, context=8)
    assert torch.equal(state, torch.get_rng_state())


def test_windows_reach_the_first_and_the_last_byte() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    inputs, targets = text.held_out_batch(data, rows=5, context=10)
    assert inputs[0, 0] == 0 and targets[-1, -1] == 99
    seen = {int(text.train_batch(data, seed=0, step=step, rows=64, context=98)[0][:, 0].max()) for step in range(4)}
    assert seen == {1}, "with 100 bytes and windows of 99 there are two places to begin"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_shares_of_the_ranks_are_the_batch_in_order(world: int) -> None:
    batch = text.train_batch(torch.arange(250, dtype=torch.uint8), seed=1, step=2, rows=8, context=16)
    shares = [text.share(batch, rank=rank, world=world) for rank in range(world)]
    assert {len(inputs) for inputs, _ in shares} == {8 // world}
    for part in (0, 1):
        assert torch.equal(torch.cat([share[part] for share in shares]), batch[part])
