"""What generation costs where parameters are streamed: one process decodes with the same model under every choice.

    python benchmarks/generate.py [--dim 512] [--layers 12] [--tokens 16] [--rounds 5] [--dtype fp32] [--folder .]

Each round decodes the same tokens under every choice, in an order that turns by one place; a choice's ratio is taken to
`plain` of the same round, and the table shows the median and the range over the rounds. It needs transformers.

    plain       the model as it is
    device      attached, parameters on the device
    resident    attached, inside `attachment.resident()`, parameters on the host
    host, disk  parameters there; every token streams the whole model
    disk-half   on disk, with a [budget] device that keeps about half of the model gathered from token to token

The floor of a choice that streams is what it streams in a token over the bandwidth of a copy, or of the disk's own reads,
measured in the same process. Every choice must generate what plain does, or it stops.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zhooks
from offload.disk import DiskFile

MB = 1e6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(slots=True)
class Runner:
    """One choice and its model."""

    name: str
    model: Any
    attachment: zhooks.Attachment | None

    def decode(self, prompt: Tensor, tokens: int) -> tuple[Tensor, float]:
        """What it generates, and the seconds of a token."""
        resident = self.attachment is not None and self.name == "resident"
        with self.attachment.resident() if resident and self.attachment is not None else nullcontext():
            begin = time.perf_counter()
            made: Tensor = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens
            )
            return made, (time.perf_counter() - begin) / tokens


def build(dim: int, layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=dim, intermediate_size=3 * dim, num_hidden_layers=layers, num_attention_heads=dim // 64,
        num_key_value_heads=dim // 64, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made: Any = LlamaForCausalLM(config)
    return made.to(dtype).eval().requires_grad_(False)


def choices(nbytes: int, folder: str) -> dict[str, dict[str, Any] | None]:
    """The policies by name; None is no attachment."""
    units = {"units": {"min_numel": 0}}
    disk = {**units, "parameter": {"tier": "disk"}, "disk": {"path": folder}}
    host = {**units, "parameter": {"tier": "host"}}
    half = {**disk, "budget": {"device": nbytes // 2}}
    return {"plain": None, "device": units, "resident": host, "host": host, "disk": disk, "disk-half": half}


def bandwidths(folder: Path, nbytes: int = 128 << 20) -> tuple[float, float]:
    """Bytes a second of a copy in memory, and of reads from the disk; the best of three each."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    file = DiskFile(folder)
    extent = file.allocate(nbytes, "bandwidth")
    file.write(extent, source).synchronize()

    def seconds(move: Any) -> float:
        begin = time.perf_counter()
        move()
        return time.perf_counter() - begin

    copy = min(seconds(lambda: target.copy_(source)) for _ in range(3))
    read = min(seconds(lambda: file.read(extent, target).synchronize()) for _ in range(3))
    file.close()
    return nbytes / copy, nbytes / read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    prompt = torch.randint(3, 2048, (1, 8), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        copy, read = bandwidths(Path(folder))
        plain = build(chosen.dim, chosen.layers, DTYPES[chosen.dtype])
        nbytes = sum(param.nbytes for param in plain.parameters())
        runners = []
        for name, policy in choices(nbytes, folder).items():
            model = plain if policy is None else build(chosen.dim, chosen.layers, DTYPES[chosen.dtype])
            runners.append(Runner(name, model, None if policy is None else zhooks.attach(model, policy=policy)))
        seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
        wanted, _ = runners[0].decode(prompt, chosen.tokens)
        for turn in range(-1, chosen.rounds):
            start = turn % len(runners)
            for runner in runners[start:] + runners[:start]:
                gc.collect()
                made, took = runner.decode(prompt, chosen.tokens)
                assert torch.equal(made, wanted), f"{runner.name} generates something else than plain"
                if turn >= 0:  # the first round warms up
                    seconds[runner.name].append(took)
        for runner in runners:
            if runner.attachment is not None:
                runner.attachment.detach()
    print(f"{nbytes / MB:.0f} MB of parameters; a copy {copy / 1e9:.1f} GB/s, disk reads {read / 1e9:.1f} GB/s")
    print(f"floor: host {1e3 * nbytes / copy:.1f} ms a token, disk {1e3 * nbytes / read:.1f} ms")
    print(f"{'':10}{'ms a token':>12}{'x plain':>10}{'range':>16}")
    for name, times in seconds.items():
        ratios = sorted(one / base for one, base in zip(times, seconds["plain"], strict=True))
        spread = f"{ratios[0]:.2f}-{ratios[-1]:.2f}"
        print(f"{name:10}{1e3 * statistics.median(times):12.1f}{statistics.median(ratios):10.2f}{spread:>16}")


if __name__ == "__main__":
    main()
