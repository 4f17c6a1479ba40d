"""Which tests mutation testing runs for a change: those that run the changed line, in whatever process, the quickest first.

pytest runs it on sources and tests of its own, in a program of its own. What cosmic-ray changes is not tried here.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import pytest

from tests.mutation.reach import Ran, Reach, marked, read
from tests.support.forked import python

SUBJECT = '''"""What is changed."""

from __future__ import annotations

LIMIT = 3


def twice(x: int, by: int = 2) -> int:
    """A docstring sets no mark."""
    if x < 0:
        return -twice(-x)
    elif x > LIMIT:
        raise ValueError(
            f"{x} is too much")
    return by * x


class Counter:
    step = 1

    @property
    def start(self) -> int:
        return 0

    def count(self) -> list[int]:
        def odd(x: int) -> bool:
            return x % 2 == 1

        return [x for x in range(self.start, 4, self.step) if odd(x)]


def nobody() -> int:
    return 1
'''

TESTS = """
import os, time
import pytest
from subject import Counter, twice

def test_slowly_in_a_fork_that_is_killed():
    time.sleep(1.5)
    pid = os.fork()
    if pid == 0:
        twice(-1)
        os.kill(os.getpid(), 9)
    os.waitpid(pid, 0)

def test_too_much():
    with pytest.raises(ValueError):
        twice(5)

def test_counter():
    assert Counter().count() == [1, 3]
    assert twice.__doc__ == "A docstring sets no mark."
"""

FORK, MUCH, COUNTER = "test_slowly_in_a_fork_that_is_killed", "test_too_much", "test_counter"

MEASURE = """
import sys
from pathlib import Path
import pytest
from tests.mutation.reach import Watch
watch = Watch(Path("marks"))
sys.path.insert(0, ".")
assert pytest.main(["-q", "-p", "no:cacheprovider", "-c", "pytest.ini", "test_subject.py"], plugins=[watch]) == 0
watch.write(Path("ran"))
"""


@pytest.fixture(scope="module")
def reach(tmp_path_factory: pytest.TempPathFactory) -> Reach:
    folder = tmp_path_factory.mktemp("measured")
    found = marked(SUBJECT, 5, folder / "marks")
    (folder / "marks").write_bytes(bytes(5 + found.count))
    for name, text in (("subject.py", found.source), ("test_subject.py", TESTS), ("pytest.ini", "[pytest]\n")):
        (folder / name).write_text(text, encoding="utf-8")
    ended = python("-c", MEASURE, at=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Reach({"subject.py": found}, read(folder / "ran"))


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        ("if x < 0", {FORK, MUCH}),
        ("return -twice", {FORK}),
        ("elif x >", {FORK, MUCH}),
        ('f"{x} is too much"', {MUCH}),
        ("return by * x", {FORK}),
        ("by: int = 2", {FORK, MUCH}),
        ("LIMIT = 3", {FORK, MUCH, COUNTER}),
        ("step = 1", {FORK, MUCH, COUNTER}),
        ("@property", {COUNTER}),
        ("return x % 2", {COUNTER}),
        ("for x in range", {COUNTER}),
        ("return 1", set()),
        ("def nobody", set()),
    ],
)
def test_a_change_is_tried_on_the_tests_that_run_its_line(reach: Reach, text: str, tests: Set[str]) -> None:
    line = next(number for number, line in enumerate(SUBJECT.splitlines(), 1) if text in line)
    assert {ran.name.partition("::")[2] for ran in reach.of("subject.py", line)} == tests


def test_what_a_test_has_run_does_not_count_for_the_next(reach: Reach) -> None:
    marks = {ran.name.partition("::")[2]: ran.marks for ran in reach.ran}
    assert marks[COUNTER].isdisjoint(marks[MUCH] | marks[FORK])
    assert min(set().union(*marks.values())) == 5, "marks before the first are another source's"


def test_quick_tests_come_first_and_those_of_about_one_length_file_by_file() -> None:
    seconds = {"a::long": 9.0, "a::short": 0.04, "b::longer": 3.0, "b::short": 0.01, "a::none": 0.0, "a::longer": 2.5}
    ran = [Ran(name, took, frozenset({0})) for name, took in seconds.items()]
    found = Reach({"subject.py": marked("def f(x): return x", 0, Path("marks"))}, ran).of("subject.py", 1)
    assert [one.name for one in found] == ["a::short", "a::none", "b::short", "a::longer", "b::longer", "a::long"]
