"""How a rank's state travels to the rank at its place in another job: torchft's CheckpointTransport over a socket of our own.

``torchft.py`` gives it to torchft's Manager, which tells it who needs what; the Manager's caller then serves, or takes.  It
pickles nothing and holds no more than one chunk.

Note: [Messages]
    The one who takes says {"token", "step"}; the one who serves answers with the header of its ``OfferedState``, or
    {"refused"}.  Then the taker asks {"name", "start", "numel"} and gets those bytes, until it closes the connection.
    Messages are JSON behind their length.  The token is part of the address, which torchft tells whoever asks its Manager: it
    keeps out strangers who find the port, not those who speak torchft's protocol.  Strangers meet a thread of their own, a
    few at a time and not for long; the thread that trains hears of those who said the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from offload.errors import CheckpointError
from offload.events import now_ns
from offload.shards import DTYPES, blocks
from zhooks.integrations.required import require
from zhooks.resilience import OfferedState, PeerLostError, extra_of

require("torchft", "torchft", (0, 2))

from torchft.checkpointing import CheckpointTransport  # noqa: E402

__all__ = ["Arriving", "Asked", "PeerTransfer"]

_LENGTH = struct.Struct("<Q")
_MOST = 512 << 20
#: Of a first message, by whoever it is: how long it may be and take, and from how many it is waited for at once.
_FIRST, _FIRST_S, _STRANGERS = 4096, 5.0, 32


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
        server, token = _listen(hostname), secrets.token_hex(16)
        self._address = f"{hostname}:{server.getsockname()[1]}#{token}"
        self._listener = _Listener(server, token)
        self._close = weakref.finalize(self, self._listener.close)
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
                    f"Cannot use the state of {arriving.where}. Expected what is registered here with register_state_dict_fn, "
                    f"{sorted(here)}, found {sorted(there)}. Register the same in all replicas."
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
        self._close()

    # What is done on the thread that trains.

    def serve(self, state: OfferedState | CheckpointError, asked: Asked) -> int:
        """Answer until all who need the state have it or are gone, or nobody has come for the timeout.

        Returns:
            How many came.
        """
        first = {"refused": str(state)} if isinstance(state, CheckpointError) else state.header
        came: set[socket.socket] = set()
        over = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener.came, selectors.EVENT_READ)
            try:
                while over < asked.peers and (ready := selector.select(asked.timeout_s)):
                    for key, _ in ready:
                        if key.fileobj is self._listener.came:
                            for newcomer in self._greeted(asked, first):
                                selector.register(newcomer, selectors.EVENT_READ)
                                came.add(newcomer)
                            continue
                        peer: socket.socket = key.fileobj  # type: ignore[assignment]
                        try:
                            asks = _receive(peer, _MOST)
                            if isinstance(state, OfferedState):
                                _send_all(peer, state.read(str(asks["name"]), int(asks["start"]), int(asks["numel"])))
                        except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError):
                            selector.unregister(peer)
                            came.remove(peer)
                            peer.close()
                            over += 1
            finally:
                for peer in came:
                    peer.close()
        return over

    def _greeted(self, asked: Asked, first: dict[str, Any]) -> Iterator[socket.socket]:
        """Those who have come since, and are told ``first``: peers at this step."""
        for peer, step in self._listener.take():
            peer.settimeout(asked.timeout_s)
            right = step == asked.step
            try:
                _send(peer, first if right else {"refused": "", "step": asked.step})
            except OSError:
                right = False
            if right:
                yield peer
            else:
                peer.close()


def _listen(hostname: str) -> socket.socket:
    """Where ``hostname`` says that this process is; on all addresses where the name does not say it here."""
    with suppress(OSError, UnicodeError):
        (family, _, _, _, at), *_ = socket.getaddrinfo(hostname, 0, type=socket.SOCK_STREAM)
        # Debian gives a host's own name an address of the loopback, which others know by a real one.
        if hostname == "localhost" or at[0] == hostname or not ipaddress.ip_address(str(at[0]).partition("%")[0]).is_loopback:
            return socket.create_server(at[:2], family=family, backlog=128)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=dual)


class _Listener:
    """Accepts who connects, on a thread of its own, and hands on those who say the token in time.

    Attributes:
        came: readable when somebody has been handed on since ``take``.
    """

    def __init__(self, server: socket.socket, token: str) -> None:
        self.came, self._notify = socket.socketpair()
        self._peers: SimpleQueue[tuple[socket.socket, object]] = SimpleQueue()
        # A connection may be gone again before it is accepted, and nobody may take what is handed on.
        for each in (server, self.came, self._notify):
            each.setblocking(False)
        self._stopped, self._stop = socket.socketpair()
        arguments = (server, token.encode(), self._stopped, self._peers, self._notify)
        self._thread = threading.Thread(target=_accept, args=arguments, name="zhooks-peers", daemon=True)
        self._thread.start()

    def take(self) -> Iterator[tuple[socket.socket, object]]:
        """Who has been handed on, and the step that each asks for."""
        with suppress(BlockingIOError):
            self.came.recv(_FIRST)
        with suppress(Empty):
            while True:
                yield self._peers.get_nowait()

    def close(self) -> None:
        """Let nobody in any more."""
        self._stop.close()
        # The last reference may die in that thread, which then runs the finalizer.
        if self._thread is not threading.current_thread():
            self._thread.join()
        for peer, _ in self.take():
            peer.close()
        for each in (self.came, self._notify, self._stopped):
            each.close()


def _accept(
    server: socket.socket,
    token: bytes,
    stopped: socket.socket,
    peers: SimpleQueue[tuple[socket.socket, object]],
    notify: socket.socket,
) -> None:
    """Until ``stopped`` is readable: read everybody's first message as it comes; who has the token is put into ``peers``."""
    #: By who has not said all of it yet, the oldest first: what was said, and until when it is waited for.
    strangers: dict[socket.socket, tuple[bytes, int]] = {}
    with server, selectors.DefaultSelector() as selector:

        def drop(stranger: socket.socket) -> None:
            del strangers[stranger]
            selector.unregister(stranger)

        for each in (server, stopped):
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select(_FIRST_S if strangers else None)]
            if stopped in ready:
                break
            for stranger in [each for each in strangers if each in ready]:
                said, deadline = strangers[stranger]
                try:
                    heard = stranger.recv(_FIRST)
                    asks = _message(said + heard) if heard else {}
                except BlockingIOError:
                    continue
                except (OSError, ValueError, RecursionError):
                    asks = {}
                if asks is None:
                    strangers[stranger] = said + heard, deadline
                    continue
                drop(stranger)
                if hmac.compare_digest(str(asks.get("token")).encode(errors="replace"), token):
                    peers.put((stranger, asks.get("step")))
                    with suppress(BlockingIOError):
                        notify.send(b".")
                else:
                    stranger.close()
            if server in ready:
                with suppress(OSError):
                    stranger, _ = server.accept()
                    stranger.setblocking(False)
                    strangers[stranger] = b"", now_ns() + int(_FIRST_S * 1e9)
                    selector.register(stranger, selectors.EVENT_READ)
            late = [each for each, (_, deadline) in strangers.items() if now_ns() > deadline]
            for stranger in late or list(strangers)[:-_STRANGERS]:
                drop(stranger)
                stranger.close()
        for stranger in strangers:
            stranger.close()


def _message(said: bytes) -> dict[str, Any] | None:
    """A first message; None while more of it is to come."""
    if len(said) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(said)
    if length > _FIRST:
        raise ValueError(f"a message of {length} bytes")
    raw = said[_LENGTH.size :]
    return None if len(raw) < length else _decoded(raw[:length])


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
            raise PeerLostError(
                f"Cannot use the state of {self.where}. Expected the state of step {step}, found step {header['step']}."
            )
        if "refused" in header:
            raise CheckpointError(
                f"Cannot use the state of {self.where}. Expected one that can be transferred, found: {header['refused']}"
            )
        return header

    def ask(self, name: str, start: int, numel: int) -> Tensor:
        """See ``peer_state.Ask``."""
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
        return PeerLostError(f"Cannot use the state of {self.where}. Expected the peer to keep answering, found: {error}.")


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
    return _decoded(raw)


def _decoded(raw: bytes | bytearray) -> dict[str, Any]:
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
        for block in blocks(each):
            peer.sendall(block.data)
