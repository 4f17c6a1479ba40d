"""Collectives and agreement between ranks; the only package that calls torch.distributed to move anything."""

from __future__ import annotations

from offload.work import DONE, Work
from zhooks.comm.alone import Alone
from zhooks.comm.choose_transport import CHANNELS_OF, OPENERS, Comm, Opening, open_axes, open_comm, open_group, reopen_comm
from zhooks.comm.chunks import Chunk, chunks_of, even, gather, in_order, norms_of_runs, own_ranges, read
from zhooks.comm.control import ControlPlane, Exchange, GatherControl, text_digest
from zhooks.comm.fetch_bytes import Move, Span, fetch
from zhooks.comm.lost_rank import LOOK_S, SAME_ORDER, AgreedFailure, BackendWork, interrupt_group, machine
from zhooks.comm.progress import LastInputs, Progress, by_rank
from zhooks.comm.ranges import ScatteredBytes, Staged, bytes_of, copy, messages
from zhooks.comm.rendezvous import Facts, Meeting, meet, policy_facts
from zhooks.comm.transport import CHANNELS, CONTROL, GATHER, OPS, REDUCE, Call, Nbytes, Transport, TwoSteps
from zhooks.comm.users_collectives import wait_for

__all__ = [
    "CHANNELS",
    "CHANNELS_OF",
    "CONTROL",
    "DONE",
    "GATHER",
    "LOOK_S",
    "OPENERS",
    "OPS",
    "REDUCE",
    "SAME_ORDER",
    "AgreedFailure",
    "Alone",
    "BackendWork",
    "Call",
    "Chunk",
    "Comm",
    "ControlPlane",
    "Exchange",
    "Facts",
    "GatherControl",
    "LastInputs",
    "Meeting",
    "Move",
    "Nbytes",
    "Opening",
    "Progress",
    "ScatteredBytes",
    "Span",
    "Staged",
    "Transport",
    "TwoSteps",
    "Work",
    "by_rank",
    "bytes_of",
    "chunks_of",
    "copy",
    "even",
    "fetch",
    "gather",
    "in_order",
    "interrupt_group",
    "machine",
    "meet",
    "messages",
    "norms_of_runs",
    "open_axes",
    "open_comm",
    "open_group",
    "own_ranges",
    "policy_facts",
    "read",
    "reopen_comm",
    "text_digest",
    "wait_for",
]
