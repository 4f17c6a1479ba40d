"""A program: saves folders of safetensors files and, under torchrun, loads them attached and measures the memory that takes.

``test_pretrained.py`` starts it, a fresh process a rank, for memory that an earlier test gave back would be taken again unseen.
Each rank writes a file of JSON, in bytes: what it keeps, its largest unit, and how much memory it took at most.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers

import zhooks
from tests.support.inside import flats_of, units_of

TINY: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY["num_attention_heads"] = 2
#: 200 MiB in fp32, of which the largest unit is 15.6.
LARGE: dict[str, Any] = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 14}
LARGE["num_attention_heads"] = 8


def memory(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) << 10


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    cls = transformers.LlamaForCausalLM
    # Modules that are imported at the first loading are no memory of the second.
    zhooks.from_pretrained(cls, folder / "tiny", policy={"stage": 3}).detach()
    gc.collect()
    before = memory("VmRSS")
    # From here on the kernel's high-water mark is of this loading alone.
    Path("/proc/self/clear_refs").write_text("5")
    attachment = zhooks.from_pretrained(cls, folder / "large", policy={"stage": 3})
    grown = memory("VmHWM") - before
    flats = flats_of(attachment)
    kept = sum(flat.shard_numel * flat.kind.master.itemsize for flat in flats)
    unit = max(sum(flat.layout.padded * flat.kind.master.itemsize for flat in unit.flats) for unit in units_of(attachment))
    files = len(list((folder / "large").glob("*.safetensors")))
    told = {"kept": kept, "unit": unit, "grown": grown, "files": files, "rank": dist.get_rank()}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def save(folder: Path) -> None:
    """The two folders; by another process than those that are measured."""
    for name, config in (("tiny", TINY), ("large", LARGE)):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        made.save_pretrained(folder / name, max_shard_size="40MB")


if __name__ == "__main__":
    (save if "RANK" not in os.environ else main)(Path(sys.argv[1]))
