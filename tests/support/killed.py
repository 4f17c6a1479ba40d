"""A piece of work that is killed before one of its calls to the system, in a fork of the process.

The scripts of tests that kill saves call it.  It asserts nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from offload.shards import ShardWriter
from tests.support.inside import EXCHANGE


def ends_unless_killed_at(number: int, names: Sequence[str], work: Callable[[], object]) -> bool:
    """Fork, do the work, and die before the call of that number; True when it came to its end.

    Counted are these functions of ``os``, writes of shard files and the exchange of two names.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        for name in names:
            setattr(os, name, counted(getattr(os, name)))
        ShardWriter.write = counted(ShardWriter.write)  # type: ignore[method-assign]
        setattr(*EXCHANGE, counted(getattr(*EXCHANGE)))
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
