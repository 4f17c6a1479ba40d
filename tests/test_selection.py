"""The choice of cases for a default run: the choosing itself, and what a default run of this suite holds.

pytest runs it; the suite's own cases are those of this very session, collected once more where it has not collected all.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from pathlib import Path

import pytest

from tests.balance import SECONDS, longest_first
from tests.selection import COLLECTED, FOUR_RANKS, covering, in_matrix, owing, row_of, starts_ranks


def product(**factors: tuple[Hashable, ...]) -> list[dict[str, Hashable]]:
    return [dict(zip(factors, row, strict=True)) for row in itertools.product(*factors.values())]


def test_every_value_every_world_and_every_value_on_two_ranks_is_chosen() -> None:
    rows = product(world=(1, 2, 4), stage=(0, 1, 2, 3), tier=("device", "host", "disk"), reshard=(True, False))
    chosen = [rows[place] for place in covering(rows)]
    assert {row["world"] for row in chosen} == {1, 2, 4}
    assert {row["stage"] for row in chosen if row["world"] == 2} == {0, 1, 2, 3}
    assert {row["tier"] for row in chosen if row["world"] == 2} == {"device", "host", "disk"}
    assert {row["reshard"] for row in chosen if row["world"] == 2} == {True, False}
    assert len(chosen) == 6, "a case for each stage on two ranks, and one for each other world, of 72"


def test_four_ranks_are_chosen_only_where_no_case_has_two() -> None:
    rows = product(world=(1, 2, 4), tier=("device", "host"))
    chosen = [rows[place] for place in covering(rows, owing(rows, every_world=False))]
    assert {row["world"] for row in chosen} == {1, 2}
    assert {row["tier"] for row in chosen if row["world"] == 2} == {"device", "host"}
    every = covering(rows, owing(rows, every_world=True))
    assert {rows[place]["world"] for place in every} == {1, 2, 4}
    four = product(world=(3, 4), tier=("device", "host"))
    assert {four[place]["world"] for place in covering(four, owing(four, every_world=False))} == {3, 4}
    alone = [*product(world=(2,), tier=("device",)), {"world": 4, "tier": "disk"}]
    assert covering(alone, owing(alone, every_world=False)) == [0, 1], "a value that only four ranks have"


def test_of_a_table_whose_every_line_has_a_value_of_its_own_all_is_chosen() -> None:
    rows = [{"text": f"line {number}", "fails": number % 2} for number in range(20)]
    assert covering(rows) == list(range(20))


def test_workers_take_the_longest_files_first_and_the_tests_of_a_file_one_after_another() -> None:
    groups = ["short.py", "long.py", "short.py", "many.py", "long.py", *["many.py"] * 20]
    places = longest_first(groups, {"long.py": 9.0})
    assert [groups[place] for place in places] == [*["long.py"] * 2, *["many.py"] * 21, *["short.py"] * 2]
    assert places[:4] == [1, 4, 3, 5] and sorted(places) == list(range(len(groups)))


def test_every_file_whose_time_is_known_is_there() -> None:
    tests = Path(__file__).parent
    assert [name for name in SECONDS if name != FOUR_RANKS and not (tests / name).is_file()] == []


def test_a_pair_that_no_case_has_is_not_asked_for() -> None:
    rows = [{"world": 1, "stage": 0}, {"world": 2, "stage": 3}]
    assert covering(rows) == [0, 1]


def test_the_choice_is_the_same_every_time_and_prefers_two_ranks_and_stage_3() -> None:
    rows = product(world=(1, 2), tier=("device", "host"), stage=(1, 3))
    assert covering(rows) == covering(rows)
    assert rows[covering([{**row, "world": "unseen"} for row in rows])[0]]["stage"] in (1, 3)
    alike = [{"stage": stage, "of": "one"} for stage in (1, 3)]
    assert covering(alike, lambda row: {frozenset({("of", row["of"])})}) == [1]


def test_choices_given_as_a_mapping_are_factors_and_what_cannot_be_compared_is_its_text() -> None:
    assert row_of({"world": 2, "chosen": {"tier": "host", "case": (3, "fp32")}}) == {
        "world": 2, "tier": "host", "case": "(3, 'fp32')",
    }  # fmt: skip


def test_a_default_run_of_this_suite_holds_what_it_owes(pytestconfig: pytest.Config) -> None:
    """Of every function with cases on ranks: each value, each world that is owed, each value on two ranks."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in everything(pytestconfig):
        if starts_ranks(item):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    assert len(cases) > 400
    fewer, lacking = 0, []
    for name, same in cases.items():
        ours = [item for item in same if not _slow_by_its_author(item)]
        default = [item for item in ours if item.get_closest_marker("slow") is None]
        fewer += len(default) < len(ours)
        wanted = owing([row_of(item.callspec.params) for item in ours], every_world=in_matrix(name))
        shown, all_there_is = (set().union(*(wanted(row_of(i.callspec.params)) for i in some), ()) for some in (default, ours))
        lacking += [f"{name} lacks {sorted(map(str, fact))}" for fact in all_there_is - shown]
    assert not lacking
    assert fewer > 50, "or nothing was chosen"
    all_of_them = itertools.chain.from_iterable(cases.values())
    on_four = [i for i in all_of_them if "ranks4" in i.fixturenames or row_of(i.callspec.params).get("world") == 4]
    assert on_four and all(FOUR_RANKS in item.nodeid.partition("[")[2] for item in on_four), "one worker owns the pool of four"


def everything(config: pytest.Config) -> list[pytest.Function]:
    """Every test of the suite, slow ones included: this session's, or where it was told of some only, another's."""
    if {Path(argument).resolve() for argument in config.args} == {config.rootpath / "tests"}:
        return [item for item in config.stash[COLLECTED] if isinstance(item, pytest.Function)]
    found: list[pytest.Function] = []

    class Taker:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            found.extend(item for item in items if isinstance(item, pytest.Function))

    arguments = ["--collect-only", "-m", "", "-p", "no:terminal", "-p", "no:cacheprovider", str(config.rootpath / "tests")]
    assert pytest.main(arguments, plugins=[Taker()]) == pytest.ExitCode.OK
    return found


def _slow_by_its_author(item: pytest.Function) -> bool:
    return any(mark.name == "slow" for mark in [*item.callspec.marks, *getattr(item.function, "pytestmark", [])])
