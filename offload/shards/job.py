"""Which job this process is a rank of, and which process started it: what stays the same when ranks are started again.

``host_memory.py`` names a job's folder by it.  It asks the launcher alone, and is
no setting.
"""

from __future__ import annotations

import os
from dataclasses import replace

from offload.disk import Owner, started_ticks
from offload.errors import CapabilityError

__all__ = ["job_of", "launcher"]


def job_of(given: str | None) -> str:
    """The name of this job, by which ranks that are started again find what they kept.

    Args:
        given: [resilience] job; None takes torchrun's run id.
    Raises:
        CapabilityError: there is none.
    """
    if given is not None:
        return f"named {given}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is None:
        raise CapabilityError(
            "The memory of peers needs a run id by which restarted ranks find it, found no TORCHELASTIC_RUN_ID. "
            "Start the job with torchrun, or name it: [resilience] job."
        )
    # torchrun's own default is the same for all jobs; what tells them apart is the agent, which lives as long as the job.
    return f"launched by {launcher().page().decode()}" if run_id in ("", "none") else f"run {run_id}"


def launcher() -> Owner:
    """The process that started this one, and starts it again."""
    here, parent = Owner.here(), os.getppid()
    started = started_ticks(parent) if parent else None
    return here if started is None else replace(here, pid=parent, started_ticks=started)
