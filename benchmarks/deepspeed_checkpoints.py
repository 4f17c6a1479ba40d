"""Real checkpoints of DeepSpeed, made on the CPU, and what its own continuation gives: ``python deepspeed_checkpoints.py OUT``.

Run by hand where DeepSpeed is installed, and by the slow test that compares readers with it.  It imports nothing of ours.

    PYTHONPATH=<where DeepSpeed is> DS_ACCELERATOR=cpu python benchmarks/deepspeed_checkpoints.py OUT [NAME ...]

Each checkpoint is OUT/NAME with `init.pt` (the model before training) and `losses.json` beside it: the mean losses of three
steps before the save, and of three after it.  A NAME is STAGE-DTYPE-RANKS and options, e.g. `z2-bf16-4`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NAMES = (
    "z1-fp32-1", "z1-fp32-2", "z2-fp32-1", "z2-fp32-2", "z2-fp32-4", "z2-bf16-2", "z1-bf16-2", "z1-bf16-2-grad32", "z3-fp32-1",
    "z3-fp32-2", "z3-fp32-4", "z3-bf16-2", "z3-fp32-2-small", "z2-fp32-2-robin", "z2-fp32-4-universal",
    "z3-fp32-2-universal", "z0-fp32-2", "z2-fp32-2-client", "z3-fp32-2-gathered", "z2-fp32-2-nofrozen", "z2-fp32-2-legacy",
)  # fmt: skip
STEPS = 3


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.a = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.b = nn.Linear(7, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.arange(3.0))
        for param in self.frozen.parameters():
            param.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.frozen(self.norm(torch.tanh(self.a(self.embed(tokens)))))
        out: Tensor = self.head(self.b(hidden))
        return out


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, the rest does not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def batches(world: int) -> list[Tensor]:
    """The tokens of every step, of all ranks."""
    generator = torch.Generator().manual_seed(17)
    return [torch.randint(0, 10, (world * 2, 5), generator=generator) for _ in range(2 * STEPS)]


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).float().view(-1, 10), tokens.roll(1, 1).view(-1))


def config_of(name: str) -> dict[str, Any]:
    stage, dtype, _, *options = name.split("-")
    zero: dict[str, Any] = {"stage": int(stage[1:]), "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    config["zero_optimization"] = zero
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if "grad32" in options:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if "small" in options:
        zero["sub_group_size"] = 60
    if "robin" in options:
        zero["round_robin_gradients"] = True
    if "legacy" in options:
        config["checkpoint"] = {"checkpoint_serialization": False}
    if "gathered" in options:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    return config


def train(name: str, out: Path, rank: int, world: int, port: int) -> None:
    import deepspeed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(3)
    model = Net()
    if rank == 0:
        torch.save(model.state_dict(), out / f"{name}.init.pt")
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    deepspeed.init_distributed("gloo", dist_init_required=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(name))
    client: dict[str, Any] = {"epoch": 3, "note": "x"}
    if "client" in name:
        import argparse
        import collections

        client |= {
            "args": argparse.Namespace(lr=1), "table": torch.arange(4.0), "counts": collections.Counter("aab"),
            "pair": (1, [2.5]), "where": Path("x"),
        }  # fmt: skip
    losses = []
    for step, batch in enumerate(batches(world)):
        if step == STEPS:
            engine.save_checkpoint(str(out / name), client_state=client, exclude_frozen_parameters="nofrozen" in name)
        loss = loss_of(engine, batch[2 * rank : 2 * rank + 2])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
    if rank == 0:
        (out / f"{name}.losses.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def universal(folder: Path) -> None:
    """Its own conversion of the newest checkpoint in the folder, beside it."""
    from argparse import Namespace

    from deepspeed.checkpoint import ds_to_universal

    tag = (folder / "latest").read_text()
    ds_to_universal.main(
        Namespace(
            input_folder=str(folder / tag), output_folder=str(folder / f"{tag}_universal"), num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
        )
    )  # fmt: skip


def main() -> int:
    import deepspeed  # noqa: F401

    # The kernel would be compiled, for minutes.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    out, failed = Path(sys.argv[1]), 0
    out.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or NAMES:
        world = int(name.split("-")[2])
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        ranks = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    train(name, out, rank, world, port)
                    if rank == 0 and "universal" in name:
                        universal(out / name)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            ranks.append(pid)
        bad = [pid for pid in ranks if os.waitpid(pid, 0)[1]]
        print(f"{name}: {'failed' if bad else 'ok'}", flush=True)
        failed += bool(bad)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
