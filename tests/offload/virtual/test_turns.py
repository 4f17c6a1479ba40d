"""Programs that take turns: one runs at a time, on its own machine, and who can never go on is named."""

from __future__ import annotations

import pytest

from offload.errors import SimulationError
from offload.virtual import Machine, Turns, running
from tests.support.virtual import Flat, on_virtual


def turns(count: int, programs: list[object]) -> Turns[object]:
    machines = [Machine(Flat()) for _ in range(count)]
    return Turns(machines, programs, lambda number: None, lambda number: f"program {number}")  # type: ignore[arg-type]


@on_virtual()
def test_each_program_runs_on_its_own_machine_until_it_waits() -> None:
    done: list[str] = []

    def first() -> object:
        done.append("first begins")
        both.until(lambda: "second" in done, "the second")
        done.append("first ends")
        return running()

    def second() -> object:
        done.append("second")
        return running()

    both = turns(2, [first, second])
    machines = both.run()
    assert done == ["first begins", "second", "first ends"]
    assert machines[0] is not machines[1]
    with pytest.raises(SimulationError, match="needs to be used inside a simulation"):
        running()


@on_virtual()
def test_programs_that_wait_for_each_other_for_ever_are_named() -> None:
    def waits(name: str) -> object:
        both.until(lambda: False, name)
        return None

    both = turns(2, [lambda: waits("one thing"), lambda: waits("another")])
    with pytest.raises(SimulationError, match="program 0 waits for one thing; program 1 waits for another"):
        both.run()


@on_virtual()
def test_the_first_error_ends_all_programs_and_is_raised() -> None:
    ended: list[str] = []

    def waits() -> object:
        try:
            both.until(lambda: False, "nothing")
        finally:
            ended.append("unwound")
        return None

    def fails() -> object:
        raise KeyError("mine")

    both = turns(3, [waits, fails, lambda: ended.append("never")])
    with pytest.raises(KeyError, match="mine"):
        both.run()
    assert ended == ["unwound"]
    assert turns(1, [lambda: 3]).run() == [3], "nothing is left behind"
