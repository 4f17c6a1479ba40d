"""A call that orders streams and is left out of the CUDA code is found by the race detector on the virtual device."""

from __future__ import annotations

import pytest

from tests.mutants.programs import PROGRAMS
from tests.mutants.run import UNSEEN, judge, run
from tests.mutants.sites import Site, sites, without
from tests.support.slow import slow
from tests.support.virtual import on_virtual

#: Calls of a device with streams that "host" makes, a tier that all of them are for.
SAMPLE = (
    "_Copy.wait: current.wait_event(self.event)",
    "_Copy.synchronize: self.event.synchronize()",
    "StreamDevice.copy: stream.wait_event(self.mark() if after is None else after)",
    "StreamDevice.mark: event.record(self.calls.current())",
)
PARTS = 12


def of(key: str) -> Site:
    (site,) = (site for site in sites() if site.key == key)
    return site


@on_virtual(key=(*SAMPLE[:2], *slow(*SAMPLE[2:])))
def test_a_missing_call_of_the_cuda_device_is_a_race(key: str) -> None:
    with without(of(key)):
        assert run("host").found


@on_virtual()
def test_the_same_training_with_all_calls_in_place_is_none() -> None:
    assert not run("host").found


@on_virtual(name=tuple(PROGRAMS))
def test_programs_of_the_store_and_the_device_are_ordered(name: str) -> None:
    races = run(name)
    assert not races.found, "\n".join(map(str, races.found))


def test_the_calls_that_are_looked_at_are_there() -> None:
    """What is known of calls is of calls that the sources have."""
    known = {site.key for site in sites()}
    assert set(UNSEEN) <= known
    files = ("offload/device/stream_device.py", "offload/device/streams.py", "zhooks/unit/flat.py", "offload/store/block.py")
    for path in files:
        assert any(site.path == path for site in sites())


@pytest.mark.slow
@on_virtual(limit_s=3600.0, part=tuple(range(PARTS)))
def test_every_missing_call_of_the_seam_to_the_device_is_shown_but_those_that_are_known(part: int) -> None:
    seam = [site for site in sites() if site.path.startswith("offload/device/")]
    unseen = {site.key for site in seam[part::PARTS] if judge(site).shown_by is None}
    assert unseen <= set(UNSEEN)
