"""One rank's program: a short run with everything in it that waits for other ranks, and one fault at one labelled event of it.

``harness.py`` starts it in processes of their own and compares what it writes.  It recovers as a user would: by
``attachment.recover()`` and the step again; it asserts nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zhooks
from offload.events import Event, listen
from tests.support.values import full

#: Ranks wait for each other so long.
TIMEOUT_S = 20.0
STEPS = 5
#: The checkpoint that every run has from its start on, and the one that it writes beside training.
FIRST, SECOND = "step-0", "step-3"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run: ranks, transport, stage, and the tier of states and gradients."""

    world: int = 2
    transport: str = "shm"
    stage: int = 3
    tier: str = "device"

    def policy(self, folder: Path, stage: int | None = None) -> dict[str, Any]:
        return {
            "stage": self.stage if stage is None else stage,
            "units": {"min_numel": 0},
            "comm": {"transport": self.transport, "timeout_s": TIMEOUT_S},
            "optimizer": {"tier": self.tier},
            "gradient": {"tier": self.tier},
            "disk": {"path": str(folder)},
        }


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one rank: ``kind`` at the ``nth`` event of that name (from 0).

    ``kind``: "kill", "stop" (for longer than ranks wait), "delay" (for less), "corrupt" (bytes of a file that holds
    state are changed), "" (nothing).
    """

    kind: str = ""
    rank: int = 0
    event: str = ""
    nth: int = 0
    seed: int = 0


class Injector:
    """Counts labelled events, and lets the fault happen at its own."""

    def __init__(self, rank: int, fault: Fault, folder: Path) -> None:
        self._rank, self._fault, self._folder = rank, fault, folder
        self.seen: Counter[str] = Counter()
        self.order: list[tuple[str, int]] = []

    def on_event(self, event: Event) -> None:
        if event.kind in ("counter", "hold"):
            return
        name = f"{event.kind} {event.what} {event.key}"
        number, fault = self.seen[name], self._fault
        self.seen[name] += 1
        self.order.append((name, number))
        if fault.kind and fault.rank == self._rank and (name, number) == (fault.event, fault.nth):
            self._happen()

    def _happen(self) -> None:
        kind = self._fault.kind
        note(self._folder / "happened", str(time.monotonic()))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            note(self._folder / "stopped", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "delay":
            time.sleep(0.2 + 0.2 * (self._fault.seed % 5))
        elif kind == "corrupt":
            corrupt(self._folder, self._fault.seed)


def corrupt(folder: Path, seed: int) -> None:
    """Change bytes in the middle of one file that holds state: a scratch file, or a checkpoint's."""
    files = sorted([*folder.glob("zhooks-*.scratch"), *folder.glob("step-*/rank-*.safetensors")])
    if not files:
        return
    path = files[seed % len(files)]
    size = path.stat().st_size
    with path.open("r+b") as file:
        start = 4096 + (seed * 977) % max(1, size - 4096 - 64)
        file.seek(start)
        before = file.read(64)
        file.seek(start)
        file.write(bytes(255 - byte for byte in before))


def note(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    path.with_name(f"{path.name}.part").write_text(text)
    path.with_name(f"{path.name}.part").rename(path)


class Run:
    """The run of one rank."""

    def __init__(self, rank: int, folder: Path, setting: Setting) -> None:
        self.rank, self.folder, self.setting = rank, folder, setting
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.attachment = zhooks.attach(self.model, policy=setting.policy(folder))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses: dict[int, str] = {}
        self.said: list[tuple[str, str, float]] = []

    def batch(self, step: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + self.rank))

    def train(self, step: int) -> None:
        loss = self.model(self.batch(step)).square().mean()
        loss.backward()
        self.losses[step] = loss.item().hex()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def again(self, work: Any) -> None:
        """Do it, and once more after a recovery where ranks did not meet."""
        try:
            work()
        except zhooks.DivergenceError as error:
            self.hear(error)
            self.attachment.recover()
            work()

    def hear(self, error: BaseException) -> None:
        self.said.append((type(error).__name__, str(error), time.monotonic()))

    def whole(self, first: int) -> None:
        self.again(lambda: self.attachment.save(self.folder / FIRST, self.optimizer, extra={"step": 0}))
        for step in range(first, STEPS):
            self.again(partial(self.train, step))
            if step == 2:
                self.again(partial(self.save_beside, step))
            elif step == 3:
                self.again(lambda: self.attachment.apply(self.setting.policy(self.folder, (self.setting.stage + 1) % 4)))
        self.again(lambda: self.attachment.load(self.folder / SECOND, self.optimizer))
        self.again(lambda: self.train(3))

    def save_beside(self, step: int) -> None:
        self.attachment.save(self.folder / SECOND, self.optimizer, extra={"step": step + 1}, wait=False).wait()

    def digest(self) -> str:
        """The losses, and the values of all parameters."""
        found = hashlib.sha256(json.dumps(self.losses, sort_keys=True).encode())
        with torch.no_grad():
            for value in full(self.model):
                found.update(value.numpy().tobytes())
        return found.hexdigest()


def join(rank: int, world: int, folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )


def main(rank: int, folder: str, setting: Setting, fault: Fault) -> None:
    """The whole run, with its fault."""
    place = Path(folder)
    with (place / f"log-{rank}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    injector, run = Injector(rank, fault, place), None
    result: dict[str, Any] = {}
    try:
        join(rank, setting.world, place)
        listen(injector)
        run = Run(rank, place, setting)
        run.whole(0)
        result["digest"] = run.digest()
    except BaseException as error:
        result["error"] = [type(error).__name__, str(error), time.monotonic()]
        result["trace"] = traceback.format_exc()
    result |= {"said": [] if run is None else run.said, "events": injector.order}
    note(place / f"result-{rank}", json.dumps(result))
    # No destroy_process_group: ranks that are gone would be waited for.
    sys.stdout.flush()
    os._exit(0)


def resume(rank: int, folder: str, name: str, setting: Setting) -> None:
    """Load a checkpoint that a run has left, and train to the end of it."""
    place = Path(folder)
    result: dict[str, Any] = {}
    try:
        join(rank, setting.world, place)
        run = Run(rank, place, setting)
        first = run.attachment.load(place / name, run.optimizer)["step"]
        for step in range(first, first + 2):
            run.train(step)
        result["digest"] = run.digest()
    except BaseException as error:
        result["error"] = [type(error).__name__, str(error), time.monotonic()]
    note(place / f"result-{rank}", json.dumps(result))
    os._exit(0)
