"""Collectives and agreement between ranks; the only package that calls torch.distributed to move anything."""

from __future__ import annotations

from offload.work import DONE, Work
from zhooks.comm.alone import Alone
from zhooks.comm.choose_transport import Comm, open_comm, reopen_comm
from zhooks.comm.chunks import Chunk, chunks_of, even, gather, in_order, norms_of_runs, own_ranges, read
from zhooks.comm.control import ControlPlane, GatherControl, text_digest
from zhooks.comm.fetch_bytes import Move, Span, fetch
from zhooks.comm.progress import LastInputs, Progress, by_rank
from zhooks.comm.rearrange import another_mesh, close_unused, rearranged
from zhooks.comm.rendezvous import Facts, Meeting, meet, policy_facts
from zhooks.comm.transport import CONTROL, GATHER, REDUCE, Call, Nbytes, Transport
from zhooks.comm.users_collectives import wait_for
from zhooks.comm.virtual_group import check_no_group, join_on_paper, ranks_on_paper
from zhooks.comm.virtual_stages import Stages, stages_on_paper

__all__ = [
    "CONTROL",
    "DONE",
    "GATHER",
    "REDUCE",
    "Alone",
    "Call",
    "Chunk",
    "Comm",
    "ControlPlane",
    "Facts",
    "GatherControl",
    "LastInputs",
    "Meeting",
    "Move",
    "Nbytes",
    "Progress",
    "Span",
    "Stages",
    "Transport",
    "Work",
    "another_mesh",
    "by_rank",
    "check_no_group",
    "chunks_of",
    "close_unused",
    "even",
    "fetch",
    "gather",
    "in_order",
    "join_on_paper",
    "meet",
    "norms_of_runs",
    "open_comm",
    "own_ranges",
    "policy_facts",
    "ranks_on_paper",
    "read",
    "rearranged",
    "reopen_comm",
    "stages_on_paper",
    "text_digest",
    "wait_for",
]
