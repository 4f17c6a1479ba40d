"""The methods of an Attachment, each group of them a class that it derives from."""

from __future__ import annotations

from zhooks.attachment.change import Changeable
from zhooks.attachment.choice import CHOOSERS, Chosen, Running
from zhooks.attachment.control import Controlled
from zhooks.attachment.peers import Resumable
from zhooks.attachment.preemption import Preemptible
from zhooks.attachment.recovery import Recovering, Recovery
from zhooks.attachment.replicas import Replicated
from zhooks.attachment.spans import spanned
from zhooks.attachment.watch import WATCHES, Watch, Watched

__all__ = [
    "CHOOSERS",
    "WATCHES",
    "Changeable",
    "Chosen",
    "Controlled",
    "Preemptible",
    "Recovering",
    "Recovery",
    "Replicated",
    "Resumable",
    "Running",
    "Watch",
    "Watched",
    "spanned",
]
