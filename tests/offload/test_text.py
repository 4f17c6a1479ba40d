"""Values as text for a reader."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.text import as_dollars, as_duration, as_enough, as_moment, counted, parse_duration, parse_size, plural


@pytest.mark.parametrize(
    ("price", "said"),
    [(0, "0.00 USD"), (0.0000123, "0.0000123 USD"), (0.05, "0.0500 USD"), (2.346, "2.35 USD"), (12345.6, "12,345.60 USD")],
)
def test_a_price_below_a_cent_has_three_digits(price: float, said: str) -> None:
    assert as_dollars(price) == said


@pytest.mark.parametrize(("number", "said"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1024, "1,024 steps")])
def test_a_count_and_its_noun_agree(number: int, said: str) -> None:
    assert counted(number, "step") == said


@pytest.mark.parametrize(("number", "said"), [(0, "processes"), (1, "process"), (2, "processes")])
def test_a_noun_in_s_has_a_plural_in_es(number: int, said: str) -> None:
    assert plural(number, "process") == said


@pytest.mark.parametrize(
    ("ns", "said"),
    [
        (0, "0 ms"),
        (400, "400 ns"),
        (812_345, "812 us"),
        (999_999, "1 ms"),
        (3_420_000, "3.42 ms"),
        (1_270_000_000, "1.27 s"),
        (30_000_000_000, "30 s"),
        (59_960_000_000, "1 min 0 s"),
        (134_000_000_000, "2 min 14 s"),
        (7_260_000_000_000, "2 h 1 min"),
        (3_995_963_673_058, "1 h 7 min"),
        (7_199_000_000_000, "2 h 0 min"),
        (-3_400_000, "-3.4 ms"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_suits(ns: int, said: str) -> None:
    assert as_duration(ns) == said
    assert as_duration(186_512_000, digits=4) == "186.5 ms"


@pytest.mark.parametrize(
    ("ns", "said"),
    [
        (0, "0.000 s"),
        (6_353_000_000, "6.353 s"),
        (134_250_000_000, "2 min 14.250 s"),
        (1 << 42, "1 h 13 min 18.047 s"),
    ],
)
def test_a_moment_is_said_to_the_millisecond(ns: int, said: str) -> None:
    assert as_moment(ns) == said
    assert parse_duration(said) == pytest.approx(ns, abs=500_000)


@pytest.mark.parametrize(
    ("text", "ns"),
    [("450ms", 450e6), (" 1.5 s ", 1.5e9), ("2 min 14 s", 134e9), ("1h30min", 5400e9), ("0.4us", 400), ("7", 7e9)],
)
def test_a_duration_is_read_in_any_of_its_units(text: str, ns: float) -> None:
    assert parse_duration(text, bare="s") == ns


@pytest.mark.parametrize("text", ["", "7", "1s 2min", "1s 1s", "1e5s", "-1s", "1 s x", "5 MS", "5 sec", "1 2 s", "\u0667 s"])
def test_what_is_no_duration_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(ValueError, match='expected a time such as "450ms"'):
        parse_duration(text)


@given(st.integers(0, 10**16))
def test_a_duration_is_read_back_as_it_was_written(ns: int) -> None:
    back = parse_duration(as_duration(ns))
    assert back == pytest.approx(ns, rel=0.009) and as_duration(back) == as_duration(ns)


@given(st.integers(0, 1 << 45))
def test_a_size_that_is_enough_is_at_least_as_much_and_hardly_more(nbytes: int) -> None:
    read = parse_size(as_enough(nbytes))
    assert nbytes <= read <= nbytes + max(nbytes // 100, 11)
