"""One rank of one replica, as a process of its own: trains a small model under torchft until its run is over.

`test_torchft.py` and `test_replica_kills.py` start it and read what it writes: a line of JSON a step, and its values at the
end. `plain` trains the same by itself. It asserts nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.values import sharded

WIDTH = 16


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def loss_of(net: nn.Module, step: int, group: int, rank: int) -> torch.Tensor:
    """What this rank of this replica computes at this step."""
    values = torch.Generator().manual_seed(step * 1000 + group * 10 + rank)
    loss: torch.Tensor = net(torch.randn(4, WIDTH, generator=values)).square().mean()
    return loss


def plain(history: Sequence[Sequence[int]], ranks: int) -> tuple[nn.Module, list[dict[tuple[int, int], float]]]:
    """Plain training with the mean over the replicas of each step; the model, and each step's losses."""
    net = model()
    optimizer = adam(net)
    losses: list[dict[tuple[int, int], float]] = []
    for step, groups in enumerate(history):
        optimizer.zero_grad()
        every = {(group, rank): loss_of(net, step, group, rank) for group in groups for rank in range(ranks)}
        (sum(every.values()) / len(every)).backward()
        optimizer.step()
        losses.append({place: float(loss.detach()) for place, loss in every.items()})
    return net, losses


class History:
    """The replicas that each step was made by: state of the user's, which a replica that returns is handed."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"groups": list(self.groups)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups = list(state["groups"])

    @property
    def together(self) -> int:
        """Steps made by both."""
        return sum(len(each) == 2 for each in self.groups)

    def past(self, file: Path) -> bool:
        """As many steps are made as a file says, once it is there."""
        return file.exists() and len(self.groups) >= int(file.read_text() or sys.maxsize)

    def over(self, steps: int, alone: bool) -> bool:
        """Both have made so many steps, the last ones too, and one has made some ``alone`` between others where asked."""
        text = "".join(str(len(each)) for each in self.groups)
        return self.together >= steps and text.endswith("22") and (not alone or "12" in text[text.find("2") :])


def die_in_transfer(where: str, chunk: int, armed: Path) -> None:
    """This rank is killed before it sends ("sender"), or after it has received, this chunk of the first state that is on its
    way once the file ``armed`` exists: another that joins late may take a state, too."""
    from zhooks.integrations.peer_transfer import Arriving
    from zhooks.resilience import OfferedState

    moved = 0

    def count() -> None:
        nonlocal moved
        moved += armed.exists()
        if moved == chunk:
            os.kill(os.getpid(), signal.SIGKILL)

    read, ask = OfferedState.read, Arriving.ask

    def dying_read(self: Any, name: str, start: int, numel: int) -> Any:
        count()
        return read(self, name, start, numel)

    def dying_ask(self: Any, name: str, start: int, numel: int) -> torch.Tensor:
        found = ask(self, name, start, numel)
        count()
        return found

    if where == "sender":
        OfferedState.read = dying_read  # type: ignore[method-assign]
    else:
        Arriving.ask = dying_ask  # type: ignore[method-assign]


def train(job: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torchft import ProcessGroupGloo

    import zhooks
    from zhooks.integrations.torchft import Optimizer, Replicas

    group, rank, ranks = job["group"], job["rank"], job["ranks"]
    if job.get("transfer") and rank == job["transfer"][2]:
        die_in_transfer(job["transfer"][0], job["transfer"][1], Path(job["armed"]))
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{job['port']}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job["port"]), "TORCHFT_LIGHTHOUSE": job["lighthouse"]}
    attachment = zhooks.attach(model(job.get("seed", 0)), policy=job["policy"])
    net = attachment.model
    bare = adam(net)
    history = History()
    timeout = timedelta(seconds=20)
    replicas = Replicas(
        attachment, bare, ProcessGroupGloo(timeout=timeout), 1, timeout=timeout, quorum_timeout=timedelta(seconds=60),
        replica_id=f"replica_{group}_", state_dict=history.state_dict, load_state_dict=history.load_state_dict,
    )  # fmt: skip
    optimizer = Optimizer(replicas, bare)

    def die(what: str) -> None:
        """The whole replica is gone, in the middle of what it does, once both have made so many steps."""
        if job.get("die") == [history.together, what]:
            os.killpg(0, signal.SIGKILL)

    attachment.register_reduce_hook(before=lambda *_: die("backward"), after=lambda *_: die("reduced"))
    with open(job["log"], "a", buffering=1) as log:
        while not history.over(job["steps"], job["alone"]) and not history.past(Path(job["stop"])):
            optimizer.zero_grad()
            die("forward")
            step = replicas.current_step()
            loss = loss_of(net, step, group, rank)
            loss.backward()
            optimizer.step()
            committed, count = replicas.current_step() == step + 1, replicas.num_participants()
            if committed:
                history.groups.append([0, 1] if count == 2 else [group])
            log.write(json.dumps({"step": step, "loss": float(loss.detach()), "count": count, "committed": committed}) + "\n")
            die("step")
        state = attachment.state_dict(bare)
        own = [sharded(p).to_local().clone() for p in net.parameters()]
        own += [value.to_local().clone() for p in net.parameters() for value in bare.state[p].values() if value.dim()]
        torch.save({"groups": history.groups, "own": own, "model": state.get("model")}, job["out"])
    replicas.shutdown(wait=False)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
