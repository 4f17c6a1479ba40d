"""Values as text for a reader."""

from __future__ import annotations

import pytest

from offload.text import as_dollars


@pytest.mark.parametrize(
    ("price", "said"),
    [(0, "0.00 USD"), (0.0000123, "0.0000123 USD"), (0.05, "0.0500 USD"), (2.346, "2.35 USD"), (12345.6, "12,345.60 USD")],
)
def test_a_price_below_a_cent_has_three_digits(price: float, said: str) -> None:
    assert as_dollars(price) == said
