"""A living rank's state handed over a socket to its place in another job: two attachments of one process stand for two jobs."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

import zhooks
from offload.errors import CheckpointError
from tests.support.waiting import soon

pytest.importorskip("torchft", reason="pip install '.[torchft]'")

from zhooks.integrations.peer_transfer import Arriving, Asked, PeerTransfer
from zhooks.resilience import Replica

TIERED = {"stage": 3, "parameter": {"tier": "disk"}, "optimizer": {"tier": "disk"}}
TIMEOUT = timedelta(seconds=60)


class Job:
    """A small model with buffers under a policy, trained for some steps."""

    def __init__(self, policy: dict[str, Any], steps: int = 0, width: int = 8) -> None:
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8))
        self.attachment = zhooks.attach(self.model, policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.replica = Replica(self.attachment.session, [self.optimizer])
        for _ in range(steps):
            self.step(torch.randn(4, 8))

    def step(self, batch: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.replica.forget_gradients()
        return float(loss.detach())

    def take(self, arriving: Arriving) -> None:
        self.replica.take_state(arriving.where, arriving.header, arriving.ask)


@contextmanager
def served(job: Job, beside: dict[str, Any], step: int = 7) -> Iterator[tuple[Callable[[], Arriving], PeerTransfer]]:
    """The state of ``job``, asked for by as many as call what this yields."""
    transfer = PeerTransfer("127.0.0.1", [])
    asked = Asked(1, step, beside, TIMEOUT.total_seconds())
    state = job.replica.offered_state(beside)
    thread = threading.Thread(target=transfer.serve, args=(state, asked))
    thread.start()
    try:
        yield lambda: Arriving(transfer.metadata(), step, TIMEOUT.total_seconds()), transfer
    finally:
        thread.join(60)
        transfer.shutdown()
    assert not thread.is_alive()


@pytest.mark.parametrize("policy", [{"stage": 0}, TIERED, {"precision": {"param": "bf16", "loss_scale": "dynamic"}}])
def test_a_state_that_was_taken_over_goes_on_like_the_peers_bit_for_bit(policy: dict[str, Any]) -> None:
    first, second = Job(policy, steps=3), Job(policy)
    random = torch.get_rng_state()
    with served(first, {"user": {"note": {"at": (3, "x")}}, "torchft": {"step": 7}}) as (arrive, _):
        arriving = arrive()
        second.take(arriving)
        assert arriving.beside == {"user": {"note": {"at": (3, "x")}}, "torchft": {"step": 7}}
        arriving.close()
    assert torch.equal(torch.get_rng_state(), random)
    digests = [job.replica.offered_state({}).digest() for job in (first, second)]
    assert digests[0] == digests[1]
    for batch in (torch.randn(4, 8), torch.randn(4, 8)):
        assert first.step(batch) == second.step(batch)
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one.full_tensor() if isinstance(one, zhooks.ShardedTensor) else one,
                           other.full_tensor() if isinstance(other, zhooks.ShardedTensor) else other)  # fmt: skip
    first.attachment.detach(), second.attachment.detach()


@pytest.mark.parametrize(
    ("policy", "width", "named"), [({"stage": 3}, 16, "0.weight"), ({"stage": 2}, 8, "policy, units and optimizers")]
)
def test_a_state_of_another_program_is_refused_by_name_and_nothing_has_changed(
    policy: dict[str, Any], width: int, named: str
) -> None:
    first, second = Job({"stage": 3}, steps=1), Job(policy, steps=1, width=width)
    before = second.replica.offered_state({}).digest()
    with served(first, {}) as (arrive, _):
        arriving = arrive()
        with pytest.raises(CheckpointError, match=named):
            second.take(arriving)
        arriving.close()
    assert second.replica.offered_state({}).digest() == before


def test_a_peer_at_another_step_and_one_that_is_gone_are_lost_peers() -> None:
    first, second = Job({"stage": 3}, steps=1), Job({"stage": 3})
    with served(first, {}) as (arrive, transfer):
        with pytest.raises(zhooks.CheckpointError, match="found step 7"):
            Arriving(transfer.metadata(), 6, TIMEOUT.total_seconds())
        arriving = arrive()
        arriving.close()
        with pytest.raises(CheckpointError, match="Expected the peer to keep answering"):
            second.take(arriving)
    with pytest.raises(CheckpointError, match="Expected the peer to keep answering"):
        arrive()


def test_strangers_who_find_the_port_get_nothing_and_hold_nobody_up() -> None:
    first = Job({"stage": 3}, steps=1)
    with served(first, {}) as (arrive, transfer):
        where, _, _ = transfer.metadata().partition("#")
        with pytest.raises(CheckpointError, match="Expected the peer to keep answering"):
            Arriving(f"{where}#guessed", 7, TIMEOUT.total_seconds())
        host, _, port = where.rpartition(":")
        for said in (b"GET / HTTP/1.1\r\n\r\n", struct.pack("<Q", 4000) + b"[" * 4000, struct.pack("<Q", 2) + b"{}"):
            with socket.create_connection((host, int(port)), timeout=60) as stranger:
                got = b""
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                    stranger.shutdown(socket.SHUT_WR)
                    got = stranger.recv(1)
                assert got == b""
        arriving = arrive()
        assert arriving.beside == {}
        arriving.close()


def test_strangers_who_say_little_and_stay_hold_neither_the_peer_up_nor_the_thread_that_trains() -> None:
    first = Job({"stage": 3}, steps=1)
    with served(first, {}) as (arrive, transfer), contextlib.ExitStack() as staying:
        host, _, port = transfer.metadata().partition("#")[0].rpartition(":")
        # More than are waited for at once, each with a beginning of a message.
        for _ in range(100):
            stranger = staying.enter_context(socket.create_connection((host, int(port)), timeout=60))
            with contextlib.suppress(OSError):
                stranger.sendall(b"\x10")
        arriving = arrive()
        assert arriving.beside == {}
        arriving.close()


@pytest.mark.slow
def test_a_stranger_who_says_no_token_in_time_is_sent_away_though_nobody_serves() -> None:
    transfer = PeerTransfer("127.0.0.1", [])
    host, _, port = transfer.metadata().partition("#")[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as stranger:
        stranger.sendall(b"\x10")
        assert stranger.recv(1) == b""
    transfer.shutdown()


@pytest.mark.parametrize(("hostname", "known"), [("127.0.0.1", True), ("localhost", True), ("nowhere.invalid", False)])
def test_a_replica_listens_at_the_address_that_it_announces(hostname: str, known: bool) -> None:
    transfer = PeerTransfer(hostname, [])
    port = int(transfer.metadata().partition("#")[0].rpartition(":")[2])
    with contextlib.ExitStack() as taken:
        # Another address of the loopback is free where only one is listened at.
        if known:
            other = taken.enter_context(socket.socket())
            other.bind(("127.0.0.2", port))
        else:
            with socket.create_connection(("127.0.0.2", port), timeout=60):
                pass
    transfer.shutdown()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=60)


def test_a_transfer_that_nobody_shuts_down_ends_its_thread_with_itself() -> None:
    before = threading.active_count()
    transfer = PeerTransfer("127.0.0.1", [])
    assert threading.active_count() == before + 1
    del transfer
    assert soon(lambda: threading.active_count() == before)


def test_what_cannot_be_handed_on_without_pickle_is_told_to_the_one_who_asks() -> None:
    transfer = PeerTransfer("127.0.0.1", [])
    refusal = CheckpointError("save: expected numbers, found a lock")
    thread = threading.Thread(target=transfer.serve, args=(refusal, Asked(1, 1, {}, 60.0)))
    thread.start()
    with pytest.raises(CheckpointError, match="found a lock"):
        transfer.recv_checkpoint(0, transfer.metadata(), 1, TIMEOUT)
    thread.join(60)
    transfer.shutdown()
    assert isinstance(transfer.refused, CheckpointError)
