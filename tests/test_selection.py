"""The choice of cases for a default run: the choosing itself, and what a default run of this suite holds.

pytest runs it; the suite's own cases are those of this very session, collected once more where it has not collected all.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

import pytest

from tests.balance import SECONDS, longest_first
from tests.selection import COLLECTED, FOUR_RANKS, SHARED, Case, case_of, covering, in_matrix, row_of, starts_ranks

TRAINS = "tests/a/test_loop.py::test_it_trains"
SAVES = "tests/a/test_loop.py::test_it_saves"


def product(test: str = TRAINS, /, **factors: tuple[Hashable, ...]) -> list[Case]:
    return [Case(test, dict(zip(factors, row, strict=True))) for row in itertools.product(*factors.values())]


def chosen_of(cases: list[Case]) -> list[Case]:
    return [cases[place] for place in covering(cases)]


def values(cases: list[Case], factor: str, *, world: int | None = None) -> set[Hashable]:
    return {row[factor] for _, row in cases if factor in row and world in (None, row.get("world"))}


def test_every_value_of_a_test_is_chosen_and_every_value_on_two_ranks() -> None:
    cases = product(world=(1, 2), stage=(0, 1, 2, 3), tier=("device", "host", "disk"), reshard=(True, False))
    chosen = chosen_of(cases)
    assert values(chosen, "world") == {1, 2}
    assert values(chosen, "stage", world=2) == {0, 1, 2, 3}
    assert values(chosen, "tier", world=2) == {"device", "host", "disk"}
    assert values(chosen, "reshard", world=2) == {True, False}
    assert len(chosen) == 5, "a case for each stage on two ranks, and one on one rank, of 48"


def test_tests_of_a_file_share_stages_and_tiers_and_each_has_its_own_values() -> None:
    factors: dict[str, tuple[Hashable, ...]] = {"world": (1, 2), "stage": (0, 1, 2, 3), "tier": ("device", "host")}
    cases = [*product(**factors, reshard=(True, False)), *product(SAVES, **factors)]
    chosen = chosen_of(cases)
    assert values(chosen, "stage", world=2) == {0, 1, 2, 3} and values(chosen, "tier", world=2) == {"device", "host"}
    trains, saves = ([case for case in chosen if case.test == test] for test in (TRAINS, SAVES))
    assert values(trains, "reshard", world=2) == {True, False} and values(saves, "world") >= {2}
    assert len(chosen) == 5, "four stages on two ranks and one case on one rank, between both tests"
    apart = [*cases, *product("tests/a/test_other.py::test_it_trains", **factors)]
    assert values([case for case in chosen_of(apart) if "other" in case.test], "stage", world=2) == {0, 1, 2, 3}


def test_four_ranks_are_chosen_only_where_a_test_has_nothing_else() -> None:
    cases = product(world=(1, 2, 4), tier=("device", "host"))
    assert values(chosen_of(cases), "world") == {1, 2}
    matrix = product("tests/parity/test_matrix.py::test_b", world=(1, 2, 4), tier=("device",))
    assert values(chosen_of(matrix), "world") == {1, 2, 4}
    four = product(world=(4,), kind=("sgd", "adam"))
    assert chosen_of(four) == four
    alone = [*product(world=(2,), kind=("sgd",)), Case(TRAINS, {"world": 4, "kind": "adam"})]
    assert covering(alone) == [0, 1], "a value that only four ranks have"


def test_the_parity_matrix_shares_nothing() -> None:
    tests = [f"tests/parity/test_matrix.py::{name}" for name in ("test_b", "test_c")]
    cases = [case for test in tests for case in product(test, world=(1, 2), stage=(0, 1))]
    assert all(values([case for case in chosen_of(cases) if case.test == test], "stage", world=2) == {0, 1} for test in tests)


def test_of_a_table_whose_every_line_has_a_value_of_its_own_all_is_chosen() -> None:
    cases = [Case(TRAINS, {"text": f"line {number}", "fails": number % 2}) for number in range(20)]
    assert covering(cases) == list(range(20))


def test_workers_take_the_longest_files_first_and_the_tests_of_a_file_one_after_another() -> None:
    groups = ["short.py", "long.py", "short.py", "many.py", "long.py", *["many.py"] * 20]
    places = longest_first(groups, {"long.py": 9.0})
    assert [groups[place] for place in places] == [*["long.py"] * 2, *["many.py"] * 21, *["short.py"] * 2]
    assert places[:4] == [1, 4, 3, 5] and sorted(places) == list(range(len(groups)))


def test_every_file_whose_time_is_known_is_there() -> None:
    tests = Path(__file__).parent
    assert [name for name in SECONDS if name != FOUR_RANKS and not (tests / name).is_file()] == []


def test_a_pair_that_no_case_has_is_not_asked_for() -> None:
    assert covering([Case(TRAINS, {"world": 1, "stage": 0}), Case(TRAINS, {"world": 2, "stage": 3})]) == [0, 1]


def test_the_choice_is_the_same_every_time_and_prefers_two_ranks_and_stage_3() -> None:
    cases = product(world=(1, 2), tier=("device", "host"), stage=(1, 3))
    assert covering(cases) == covering(cases)
    alike = [Case(TRAINS, {"stage": stage, "of": "one"}) for stage in (1, 3)]
    assert covering(alike, lambda case: {("of", case.row["of"])}) == [1]


def test_choices_given_as_a_mapping_are_factors_and_what_cannot_be_compared_is_its_text() -> None:
    assert row_of({"world": 2, "chosen": {"tier": "host", "case": (3, "fp32")}}) == {
        "world": 2, "tier": "host", "case": "(3, 'fp32')",
    }  # fmt: skip


def test_a_default_run_of_this_suite_holds_what_it_owes(pytestconfig: pytest.Config) -> None:
    """Of every function with cases on ranks a case and each of its values, of every file each stage and tier; on two ranks."""
    functions: dict[str, list[pytest.Function]] = {}
    for item in everything(pytestconfig):
        if starts_ranks(item):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    assert len(functions) > 400
    fewer, lacking = 0, []
    wanted, shown = defaultdict[str, set[object]](set), defaultdict[str, set[object]](set)
    for name, same in functions.items():
        ours = [case_of(item) for item in same if not _slow_by_its_author(item)]
        default = [case_of(item) for item in same if item.get_closest_marker("slow") is None]
        fewer += len(default) < len(ours)
        if ours and not default:
            lacking.append(f"{name} has no case at all")
        for cases, found in ((ours, wanted), (default, shown)):
            for test, row in cases:
                on_two = {(*choice, "on two ranks") for choice in row.items() if row.get("world") == 2}
                for factor, value, *where in {*row.items(), *on_two}:
                    shares = factor in SHARED and not in_matrix(test)
                    if in_matrix(test) or (factor, value) != ("world", 4):
                        found[test.partition("::")[0] if shares else test].add((factor, value, *where))
    lacking += [f"{owner} lacks {fact}" for owner, facts in wanted.items() for fact in facts - shown[owner]]
    assert not lacking
    assert fewer > 50, "or nothing was chosen"
    on_four = [
        i
        for i in itertools.chain.from_iterable(functions.values())
        if "ranks4" in i.fixturenames or case_of(i).row.get("world") == 4
    ]
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
