"""What the search for a subject may take: more of the processor or of memory is an error, and all is as before after it.

pytest runs it.
"""

from __future__ import annotations

import resource
import signal

import pytest
import torch

from tests.architectures.bounds import TooMuch, bounded


def test_an_attempt_that_goes_on_for_too_long_is_stopped() -> None:
    handler = signal.getsignal(signal.SIGPROF)
    with pytest.raises(TooMuch, match="too long"), bounded(cpu_s=0.05):
        while True:
            torch.ones(100).sum()
    assert signal.getsignal(signal.SIGPROF) is handler
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_an_attempt_that_wants_too_much_memory_gets_torchs_own_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(RuntimeError, match="memory"), bounded(more_nbytes=1 << 28):
        torch.empty(1 << 30, dtype=torch.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with bounded():
        assert torch.ones(1 << 20).sum() == 1 << 20
