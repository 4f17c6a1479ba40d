"""Two replicas as real processes under a real lighthouse: started, killed, and held to plain training at their end.

`test_torchft.py` and `test_replica_kills.py` use it; `replica_job.py` is what the processes run. It kills nothing by itself
before it is closed.
"""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torchft.coordination import LighthouseServer

from tests.support.paths import ROOT
from tests.support.waiting import soon
from tests.zhooks.integrations import replica_job

LIMIT_S = 300


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Two:
    """Two replicas of so many ranks, their lighthouse, and what their processes write."""

    folder: Path
    ranks: int
    policy: dict[str, Any]
    together: int
    alone: bool = False
    seeds: tuple[int, int] = (0, 0)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    latest: dict[int, list[subprocess.Popen[bytes]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Both are there from the first step on, unless one is to be lost.
        self.house = LighthouseServer(
            bind="[::]:0", min_replicas=1 if self.alone else 2, join_timeout_ms=1000, quorum_tick_ms=20,
            heartbeat_timeout_ms=1000,
        )  # fmt: skip

    @property
    def armed(self) -> Path:
        """From when on a rank may be killed in a transfer."""
        return self.folder / "armed"

    def start(
        self, group: int, die: tuple[int, str] | None = None, transfer: tuple[str, int, int] | None = None
    ) -> list[subprocess.Popen[bytes]]:
        """One replica: a process a rank, in a process group of their own; ``die``: after so many common steps, where;
        ``transfer``: see ``replica_job.die_in_transfer``, and the rank that dies."""
        port, begun = free_port(), list[subprocess.Popen[bytes]]()
        for rank in range(self.ranks):
            job = {
                "group": group, "rank": rank, "ranks": self.ranks, "port": port, "lighthouse": self.house.address(),
                "policy": self.policy, "steps": self.together, "alone": self.alone, "die": die, "transfer": transfer,
                "seed": self.seeds[group],
                "stop": str(self.folder / "stop"), "armed": str(self.armed), "log": str(self.folder / f"log{group}{rank}"),
                "out": str(self.folder / f"out{group}{rank}"),
            }  # fmt: skip
            command = [sys.executable, "-W", "error", "-m", "tests.zhooks.integrations.replica_job", json.dumps(job)]
            with open(self.folder / f"err{group}{rank}", "ab") as errors:
                begun.append(
                    subprocess.Popen(
                        command, cwd=ROOT, stdout=errors, stderr=errors, process_group=begun[0].pid if begun else 0
                    )
                )
        self.started += begun
        self.latest[group] = begun
        return begun

    def ended(self, processes: list[subprocess.Popen[bytes]]) -> list[int]:
        return [each.wait(LIMIT_S) for each in processes]

    def said(self) -> str:
        """The ends of what all of them printed."""
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("err*")))

    def check(self) -> list[list[int]]:
        """All replicas are the same to the bit, and what plain training comes to; returns who made each step."""
        every = range(self.ranks)
        outs = {(group, rank): torch.load(self.folder / f"out{group}{rank}") for group in (0, 1) for rank in every}
        groups: list[list[int]] = outs[0, 0]["groups"]
        assert all(out["groups"] == groups for out in outs.values())
        for rank in every:
            pairs = list(zip(outs[0, rank]["own"], outs[1, rank]["own"], strict=True))
            assert pairs and all(torch.equal(one, other) for one, other in pairs)
        net, losses = replica_job.plain(groups, self.ranks)
        torch.testing.assert_close(outs[0, 0]["model"], dict(net.state_dict()), rtol=1e-5, atol=1e-6)
        logged = {place: self.losses(*place) for place in outs}
        for (group, rank), step in itertools.product(outs, range(len(groups))):
            # A step that was the last before a kill may be made again by the other alone.
            found = logged[group, rank].get(step) if group in groups[step] else None
            if found is not None:
                assert found == pytest.approx(losses[step][group, rank], rel=1e-4, abs=1e-9), (group, rank, step)
        return groups

    def losses(self, group: int, rank: int) -> dict[int, float]:
        """Those of the steps that counted."""
        lines = [json.loads(line) for line in (self.folder / f"log{group}{rank}").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if line["committed"]}

    def steps_together(self, living: list[list[subprocess.Popen[bytes]]], after: int = -1) -> int:
        """Until the two have made a step together, and others after that one; the step."""
        found: list[dict[str, Any]] = []

        def together() -> bool:
            assert all(each.poll() is None for group in living for each in group), self.said()
            found[:] = [self.newest(group) for group in (0, 1)]
            return all(each["count"] == 2 and each["step"] > after for each in found)

        assert soon(together, LIMIT_S), self.said()
        return max(int(each["step"]) for each in found)

    def newest(self, group: int) -> dict[str, Any]:
        """The latest line of a replica's log."""
        log = self.folder / f"log{group}0"
        whole = [line for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []
        return dict(json.loads(whole[-1])) if whole else {"count": 0, "step": -1}

    def stop_at(self, step: int) -> None:
        """Both end with this step, which none has come to."""
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "stop")

    def close(self) -> None:
        for each in self.started:
            if each.poll() is None:
                each.send_signal(signal.SIGKILL)
                each.wait()
        self.house.shutdown()
