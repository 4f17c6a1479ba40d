"""A call that orders streams and is left out changes what the accelerator computes, unless its streams run at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.mutants.accelerated import ADVERSE, CONTROL, REPEATED, RUN, UNSEEN, Judge, steady
from tests.mutants.sites import LEAVES, Site, sites
from tests.support.on_ranks import on_accelerators
from tests.support.ranks import Pool

#: A call of each kind, and the quickest program or workload that shows it to be missing.
SAMPLE = {
    "_Copy.wait: current.wait_event(self.event)": "activation of two streams",
    "_Copy.wait: calls.keep(tensor, current)": "activation read at once",
    "_Copy.synchronize: self.event.synchronize()": "activations in a small window",
    "StreamDevice.copy: stream.wait_event(self.mark() if after is None else after)": "activation read at once",
    "StreamDevice.copy: self._in_flight[stream].append(started)": "copy that nobody waits for",
    "StreamDevice.mark: event.record(self.calls.current())": "activation read at once",
    "StreamDevice.close: stream.synchronize()": "device closed under a copy",
    "Lease.wait: keep(self.values)": "lease of two streams",
}
PARTS = 12


@pytest.fixture(scope="module")
def judge(accelerators: Callable[[int], Pool]) -> Judge:
    return Judge(accelerators)


def of(key: str) -> Site:
    (site,) = (site for site in sites(on_accelerator=True) if site.key == key)
    return site


@pytest.mark.parametrize("key", SAMPLE)
def test_a_missing_call_changes_what_is_computed_where_streams_do_not_run_at_once(key: str, judge: Judge) -> None:
    assert judge.attempt(SAMPLE[key], of(key), list(ADVERSE)) not in ("", REPEATED)
    assert judge.attempt(SAMPLE[key], of(key), [CONTROL]) in ("", REPEATED)


@on_accelerators(1, name=tuple(dict.fromkeys(SAMPLE.values())))
def test_programs_with_every_call_compute_the_same_under_every_schedule(name: str) -> None:
    steady(name)


def test_what_is_known_of_calls_is_of_calls_that_the_sources_have() -> None:
    known = {site.key for site in sites(on_accelerator=True)}
    assert {*UNSEEN, *SAMPLE, *LEAVES} <= known
    for path in ("zhooks/comm/stock.py", "zhooks/comm/lost_rank.py", "offload/store/allocation.py"):
        assert any(site.path == path for site in sites(on_accelerator=True))


@pytest.mark.slow
@on_accelerators(1, limit_s=1200.0, name=RUN[1])
def test_what_runs_on_one_rank_computes_the_same_under_every_schedule(name: str) -> None:
    steady(name)


@pytest.mark.slow
@on_accelerators(2, limit_s=1200.0, name=RUN[2])
def test_what_runs_on_two_ranks_computes_the_same_under_every_schedule(name: str) -> None:
    steady(name)


@pytest.mark.slow
@on_accelerators(4, limit_s=1200.0, name=RUN[4])
def test_what_runs_on_four_ranks_computes_the_same_under_every_schedule(name: str) -> None:
    steady(name)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_missing_call_of_the_seam_to_the_device_is_shown_but_those_that_are_known(part: int, judge: Judge) -> None:
    seam = [site for site in sites(on_accelerator=True) if site.path.startswith("offload/device/")]
    verdicts = [judge.judge(site) for site in seam[part::PARTS]]
    assert not [verdict for verdict in verdicts if verdict.control]
    assert {verdict.site.key for verdict in verdicts if verdict.shown_by is None and not verdict.repeated} <= set(UNSEEN)
