"""How a rank's state travels to the rank at its place in another job: torchft's CheckpointTransport over a socket of our own.

``torchft.py`` gives it to torchft's Manager, which tells it who needs what; the Manager's caller then serves, or takes.  It
pickles nothing and holds no more than one chunk.

Note: [Messages]
    The one who takes says {"token", "step"}; the one who serves answers with the header of its ``OfferedState``, or
    {"refused"}.  Then the taker asks {"name", "start", "numel"} and gets those bytes, until it closes the connection.
    Messages are JSON behind their length.  The token is part of the address, which torchft tells whoever asks its Manager: it
    keeps out strangers who find the port, not those who speak torchft's protocol.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.shards import CHUNK, DTYPES
from zhooks.checkpoint import OfferedState, PeerLostError, extra_of
from zhooks.integrations.required import require

require("torchft", "torchft", (0, 2))

from torchft.checkpointing import CheckpointTransport  # noqa: E402

__all__ = ["Arriving", "Asked", "PeerTransfer"]

_LENGTH = struct.Struct("<Q")
_MOST = 512 << 20
#: Of a first message, by whoever it is.
_FIRST = 4096


@dataclass(frozen=True, slots=True)
class Asked:
    """So many peers need the state of this step, and what torchft and its users keep beside it."""

    peers: int
    step: int
    beside: dict[str, Any]
    timeout_s: float


class PeerTransfer(CheckpointTransport[dict[str, Any]]):  # type: ignore[misc]
    """Notes what the Manager's quorum wants; ``serve`` and the ``arriving`` state do it, on the thread that trains.

    Args:
        beside: what this rank keeps beside its model, by name; a peer must have the same.
    Attributes:
        asked: peers need this rank's state.
        arriving: the state that this rank shall take over.
        refused: why it cannot.
    """

    def __init__(self, hostname: str, beside: Collection[str]) -> None:
        self._beside = beside
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=dual)
        # A connection may be gone again before it is accepted.
        self._server.setblocking(False)
        self._token = secrets.token_hex(16)
        self._address = f"{hostname}:{self._server.getsockname()[1]}#{self._token}"
        self.asked: Asked | None = None
        self.arriving: Arriving | None = None
        self.refused: CheckpointError | None = None

    def begin(self) -> None:
        """A quorum is about to be asked for."""
        self.asked, self.refused = None, None
        self.end()

    def end(self) -> None:
        """What was arriving is here, or is not wanted any more."""
        arriving, self.arriving = self.arriving, None
        if arriving is not None:
            arriving.close()

    # What torchft's Manager calls, on the thread of its quorum.

    def metadata(self) -> str:
        return self._address

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta) -> None:
        self.asked = Asked(len(dst_ranks), step, state_dict, timeout.total_seconds())

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        try:
            arriving = Arriving(metadata, step, timeout.total_seconds())
            self.arriving = arriving
            here, there = set(self._beside), set(arriving.beside["user"])
            if here != there:
                self.end()
                raise CheckpointError(
                    f"state of {arriving.where}: expected what is registered here with register_state_dict_fn, {sorted(here)}, "
                    f"found {sorted(there)}. Register the same in all replicas."
                )
            return arriving.beside
        except PeerLostError:
            raise
        except CheckpointError as error:
            # The Manager takes what is raised here for a lost peer, and tries again.
            self.refused = error
            raise

    def shutdown(self, wait: bool = True) -> None:
        self.end()
        self._server.close()

    # What is done on the thread that trains.

    def serve(self, state: OfferedState | CheckpointError, asked: Asked) -> int:
        """Answer until all who need the state have it or are gone, or nobody has come for the timeout.

        Returns:
            How many came.
        """
        first = {"refused": str(state)} if isinstance(state, CheckpointError) else state.header
        came: dict[socket.socket, bool] = {}
        over = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            try:
                while over < asked.peers and (ready := selector.select(asked.timeout_s)):
                    for key, _ in ready:
                        if key.fileobj is self._server:
                            self._accept(selector, came, asked)
                            continue
                        peer: socket.socket = key.fileobj  # type: ignore[assignment]
                        try:
                            if came[peer]:
                                asks = _receive(peer, _MOST)
                                if isinstance(state, OfferedState):
                                    _send_all(peer, state.read(str(asks["name"]), int(asks["start"]), int(asks["numel"])))
                            else:
                                came[peer] = self._greet(peer, asked.step, first)
                            continue
                        except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError):
                            selector.unregister(peer)
                            over += came.pop(peer)
                            peer.close()
            finally:
                for peer in came:
                    peer.close()
        return over

    def _accept(self, selector: selectors.BaseSelector, came: dict[socket.socket, bool], asked: Asked) -> None:
        try:
            peer, _ = self._server.accept()
        except OSError:
            return
        peer.settimeout(asked.timeout_s)
        came[peer] = False
        selector.register(peer, selectors.EVENT_READ)

    def _greet(self, peer: socket.socket, step: int, first: dict[str, Any]) -> bool:
        """Answer who has connected; whether it is a peer at this step."""
        asks = _receive(peer, _FIRST)
        if not hmac.compare_digest(str(asks["token"]).encode(), self._token.encode()):
            raise ValueError("another token")
        if asks["step"] != step:
            _send(peer, {"refused": "", "step": step})
            return False
        _send(peer, first)
        return True


class Arriving:
    """The state of a peer, of which nothing has been taken over yet but what torchft and its users keep beside it.

    Attributes:
        where: the peer.
        header: of its ``OfferedState``.
        beside: what ``recv_checkpoint`` returns.
    Raises:
        PeerLostError: it does not answer, or is at another step.
        CheckpointError: it cannot hand its state on.
    """

    def __init__(self, where: str, step: int, timeout_s: float) -> None:
        self.where, _, token = where.partition("#")
        host, _, port = self.where.rpartition(":")
        try:
            self._peer = socket.create_connection((host, int(port)), timeout=timeout_s)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        try:
            self.header = self._first(step, token)
            self.beside = extra_of(self.where, self.header, self.ask)
        except BaseException:
            self.close()
            raise

    def _first(self, step: int, token: str) -> dict[str, Any]:
        try:
            _send(self._peer, {"token": token, "step": step})
            header = _receive(self._peer, _MOST)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if header.get("refused") == "":
            raise PeerLostError(f"state of {self.where}: expected the state of step {step}, found step {header['step']}.")
        if "refused" in header:
            raise CheckpointError(f"state of {self.where}: expected one that can be transferred, found: {header['refused']}")
        return header

    def ask(self, name: str, start: int, numel: int) -> Tensor:
        """See ``checkpoint.Ask``."""
        dtype = DTYPES[self.header["tensors"][name][0]]
        found = torch.empty(numel, dtype=dtype, device="cpu")
        memory = found.view(torch.uint8).numpy().data
        try:
            _send(self._peer, {"name": name, "start": start, "numel": numel})
            _fill(self._peer, memory)
        except OSError as error:
            raise self._lost(error) from error
        return found

    def close(self) -> None:
        """Idempotent."""
        self._peer.close()

    def _lost(self, error: Exception) -> PeerLostError:
        return PeerLostError(f"state of {self.where}: expected the peer to keep answering, found: {error}.")


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    raw = json.dumps(message).encode()
    peer.sendall(_LENGTH.pack(len(raw)) + raw)


def _receive(peer: socket.socket, most: int) -> dict[str, Any]:
    start = bytearray(_LENGTH.size)
    _fill(peer, memoryview(start))
    (length,) = _LENGTH.unpack(start)
    if length > most:
        raise ValueError(f"a message of {length} bytes")
    raw = bytearray(length)
    _fill(peer, memoryview(raw))
    found = json.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("a message that is no dict")
    return found


def _fill(peer: socket.socket, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = peer.recv_into(memory[done:])
        if not count:
            raise ConnectionError("the end of the connection")
        done += count


def _send_all(peer: socket.socket, values: Iterable[Tensor]) -> None:
    for each in values:
        flat = each.detach().resolve_conj().resolve_neg().reshape(-1)
        step = CHUNK // flat.dtype.itemsize
        for start in range(0, flat.numel(), step):
            peer.sendall(flat[start : start + step].to("cpu").contiguous().view(torch.uint8).numpy().data)
