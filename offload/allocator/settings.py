"""The settings of torch's CUDA caching allocator: what PYTORCH_ALLOC_CONF may say, read as torch reads it.

Keys, bounds and defaults are those of pytorch's c10/core/AllocatorConfig (torch 2.13).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches

from offload.errors import PolicyError

__all__ = ["DEFAULTS", "UNBOUNDED", "Settings", "environment_line", "parse_settings"]

MIB = 1 << 20
#: Larger than any allocation: "no bound" where torch has the largest size_t.
UNBOUNDED = 1 << 62
#: One count of divisions for each power of two from 1 MiB to 32 GiB; sizes outside take the first or the last.
_INTERVALS = 16
_MIN_LARGE = 10 * MIB
#: What torch accepts and the model need not know: it changes no placement, or concerns pinned memory.
_UNMODELLED = (
    "backend",
    "graph_capture_record_stream_reuse",
    "per_process_memory_fraction",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)
_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]\s]+")


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides where the allocator places a block; bytes, except where the name says otherwise.

    ``text`` is what was parsed; ``unmodelled`` are keys torch knows that change nothing here.
    """

    text: str = ""
    expandable_segments: bool = False
    max_split_size: int = UNBOUNDED
    max_non_split_rounding: int = 20 * MIB
    large_segment_size: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    unmodelled: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tables: the text, or "default"."""
        return self.text or "default"

    def rounded(self, nbytes: int) -> int:
        """The block a request gets (round_size)."""
        if nbytes < 512:
            return 512
        power = nbytes.bit_length() - 1
        count = self.roundup_power2_divisions[min(max(power - 20, 0), _INTERVALS - 1)]
        unit = 512
        if count > 1 and nbytes > 512 * count:
            unit = 1 if nbytes == 1 << power else (1 << power) // count
        return -(-nbytes // unit) * unit

    def segment_nbytes(self, nbytes: int) -> int:
        """What the device is asked for where no free block fits a rounded request (get_allocation_size)."""
        if nbytes <= MIB:
            return 2 * MIB
        return self.large_segment_size if nbytes < _MIN_LARGE else -(-nbytes // (2 * MIB)) * 2 * MIB


DEFAULTS = Settings()


def environment_line(settings: Settings) -> str:
    """What to put before a command so that torch runs under ``settings``."""
    return f"PYTORCH_ALLOC_CONF='{settings.text}'" if settings.text else "unset PYTORCH_ALLOC_CONF"


def parse_settings(text: str) -> Settings:
    """Settings of a text such as "expandable_segments:True,max_split_size_mb:128".

    Raises:
        PolicyError: with what torch would refuse; one line.
    """
    text = text.strip()
    if len(text) > 4096:
        raise _refused("a text", "at most 4096 characters", f"{len(text)}")
    words = _TOKEN.findall(text)
    tokens = _Tokens(deque(words))
    values: dict[str, object] = {}
    unmodelled: list[str] = []
    while key := tokens.take():
        tokens.key = key
        tokens.expect(":")
        if key in _READERS:
            field, read = _READERS[key]
            values[field] = read(tokens)
        elif key in _UNMODELLED:
            tokens.skip_value()
            unmodelled.append(key)
        else:
            near = get_close_matches(key, [*_READERS, *_UNMODELLED], n=1, cutoff=0.4)
            raise _refused(repr(key), "a key of torch's allocator", "none", f"did you mean {near[0]}?" if near else "")
        if tokens.left:
            tokens.expect(",")
    settings = Settings(text="".join(words).rstrip(","), unmodelled=tuple(unmodelled), **values)  # type: ignore[arg-type]
    for field in ("max_split_size", "max_non_split_rounding"):
        if field in values and getattr(settings, field) < settings.large_segment_size:
            least, found = settings.large_segment_size // MIB, getattr(settings, field) // MIB
            raise _refused(f"{field}_mb", f"at least {least}", str(found))
    return settings


@dataclass(slots=True)
class _Tokens:
    """The words and signs of a text that are left, taken one by one, and the key whose value is read."""

    left: deque[str]
    key: str = ""

    def take(self) -> str:
        """The next; "" at the end."""
        return self.left.popleft() if self.left else ""

    def next_is(self, sign: str) -> bool:
        return bool(self.left) and self.left[0] == sign

    def refused(self, expected: str, found: str) -> PolicyError:
        return _refused(self.key, expected, repr(found) if found else "the end")

    def expect(self, sign: str) -> None:
        if (found := self.take()) != sign:
            raise self.refused(f"{sign!r} after it", found)

    def value(self, expected: str) -> str:
        word = self.take()
        if word in ("", *",:[]"):
            raise self.refused(expected, word)
        return word

    def number(self, expected: str, word: str = "") -> int:
        word = word or self.value(expected)
        if not re.fullmatch(r"[0-9]{1,12}", word, re.ASCII):
            raise self.refused(expected, word)
        return int(word)

    def power(self, number: int) -> int:
        """A power of two."""
        if number < 1 or number & (number - 1):
            raise _refused(self.key, "a power of two", str(number))
        return number

    def skip_value(self) -> None:
        if not self.next_is("["):
            self.value("a value")
            return
        while (word := self.take()) != "]":
            if not word:
                raise self.refused("']'", word)


def _refused(what: str, expected: str, found: str, remedy: str = "") -> PolicyError:
    remedy = remedy or "write them as for PYTORCH_ALLOC_CONF, e.g. expandable_segments:True"
    return PolicyError(f"allocator settings are not valid: {what}. Expected {expected}, found {found}; {remedy}")


def _megabytes(tokens: _Tokens) -> int:
    return min(tokens.number("a number of MiB") * MIB, UNBOUNDED)


def _large(tokens: _Tokens) -> int:
    nbytes = _megabytes(tokens)
    if nbytes <= _MIN_LARGE:
        raise _refused(tokens.key, "more than 10", str(nbytes // MIB))
    return nbytes


def _threshold(tokens: _Tokens) -> float:
    word = tokens.value("a number between 0 and 1")
    with suppress(ValueError):
        if 0.0 < float(word) < 1.0:
            return float(word)
    raise tokens.refused("a number between 0 and 1", word)


def _flag(tokens: _Tokens) -> bool:
    word = tokens.value("True or False")
    if word not in ("True", "False"):
        raise tokens.refused("True or False", word)
    return word == "True"


def _divisions(tokens: _Tokens) -> tuple[int, ...]:
    expected = "a power of two"
    if not tokens.next_is("["):
        return (tokens.power(tokens.number(expected)),) * _INTERVALS
    tokens.take()
    found = [0] * _INTERVALS
    last, first = 0, True
    while not tokens.next_is("]"):
        mark = tokens.value("an interval such as 256:4")
        tokens.expect(":")
        count = tokens.number(expected)
        count = tokens.power(count) if count else 0
        if mark == ">":
            found[last:] = [count] * (_INTERVALS - last)
        else:
            last = min(tokens.power(tokens.number("an interval in MiB", mark)).bit_length() - 1, _INTERVALS - 1)
            if first:
                found[:last] = [count] * last
                first = False
            found[last] = count
        if not tokens.next_is("]"):
            tokens.expect(",")
    tokens.take()
    return tuple(found)


_READERS: dict[str, tuple[str, Callable[[_Tokens], object]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "max_split_size_mb": ("max_split_size", _megabytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _megabytes),
    "large_segment_size_mb": ("large_segment_size", _large),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
}
