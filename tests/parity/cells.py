"""Cells of the parity matrix: what one cell is, which combinations make no sense and why, and a pairwise covering
array of the rest.

test_matrix.py draws its cells here, ``python -m tests.parity`` parses them from their names, oracle.py and run.py
read them. It never imports torch or zhooks: a cell is a few words.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Choice = str | int
Row = dict[str, Choice]

# The order is the order of the words in a cell's name; no value holds a dash.
FACTORS: dict[str, tuple[Choice, ...]] = {
    "model": ("mlp", "gpt", "tied", "conv", "lstm", "transformer", "bag", "mixture", "recursion"),
    "stage": (3, 2, 1, 0),
    "precision": ("fp32", "bf16", "bf16reduce", "fp16"),
    "world": (2, 1, 4),
    # twice: two micro steps, each backward a boundary; twicequiet: the first of them under no_sync.
    "accumulation": ("once", "twice", "twicequiet"),
    "clip": ("unclipped", "clipped"),
    "optimizer": ("sgd", "adamw", "adamwforeach", "adamwfused", "adagrad", "rmsprop", "written"),
    "reshard": ("reshard", "keep"),
    "transport": ("auto", "stock"),
    # each: every block its own unit; coalesced: the policy's defaults, one unit for a model this small; cut: many
    # segments a unit.
    "units": ("each", "coalesced", "cut"),
    # Where things rest. states: the optimizer alone on the host, as ZeRO-Offload; mixed: every cell on another tier;
    # ruled: by parameter name.
    "tier": ("device", "host", "disk", "states", "mixed", "ruled"),
    "prefetch": ("ahead1", "ahead0", "ahead4"),
    # pieces: [comm] buffer so small that units are several flats and large parameters pass in pieces.
    "buffers": ("whole", "pieces"),
    # reserved: [device] arena for all that lives long.
    "arena": ("loose", "reserved"),
    "activation": ("kept", "recomputed"),
    "device": ("cpu",),
}

# Choices that are tried by name: in every pair they would cost the covering array a row for each model. host30: all on
# the host but the states of 30 % of the elements, which stay on the device.
BY_NAME: dict[str, tuple[Choice, ...]] = {
    "tier": ("host30", "host70", "disk30", "disk70"),
    "activation": ("onhost",),
    "device": ("eager", "lazy", "random1", "random2", "random3"),
}

# What is tried on the asynchronous accelerator: the device is the schedule of its streams. What only concerns how a number is
# computed (models, optimizers) is the CPU matrix's; there is one transport.
ON_ACCELERATOR: dict[str, tuple[Choice, ...]] = FACTORS | {
    "model": ("gpt", "mlp", "lstm", "mixture"),
    "world": (2, 1),
    "optimizer": ("adamw", "adamwforeach", "written"),
    "transport": ("auto",),
    "tier": ("device", "host", "disk", "states", "mixed", "ruled"),
    "activation": ("kept", "recomputed", "onhost"),
    "device": ("lazy", "random1", "random2", "random3"),
}

# Parameter, gradient, optimizer.
TIERS = {
    "host": ("host", "host", "host"),
    "disk": ("disk", "disk", "disk"),
    "states": ("device", "device", "host"),
    "mixed": ("host", "disk", "disk"),
}

CUT_NUMEL = 256
PIECES_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the matrix; its ``name`` says it whole and ``Cell.parse`` reads it back."""

    model: str = "mlp"
    stage: int = 3
    precision: str = "fp32"
    world: int = 1
    accumulation: str = "once"
    clip: str = "unclipped"
    optimizer: str = "sgd"
    reshard: str = "reshard"
    transport: str = "auto"
    units: str = "each"
    tier: str = "device"
    prefetch: str = "ahead1"
    buffers: str = "whole"
    arena: str = "loose"
    activation: str = "kept"
    device: str = "cpu"

    @property
    def name(self) -> str:
        words = asdict(self) | {"stage": f"stage{self.stage}", "world": f"world{self.world}"}
        return "-".join(words.values())

    @staticmethod
    def parse(name: str) -> Cell:
        """The cell of that name.

        Raises:
            ValueError: a word is not one of its factor's values.
        """
        words = name.split("-")
        if len(words) != len(FACTORS):
            raise ValueError(f"{name}: expected {len(FACTORS)} words, found {len(words)}")
        row: Row = {}
        for (factor, values), word in zip(FACTORS.items(), words, strict=True):
            values = values + BY_NAME.get(factor, ())
            spelled = {f"{factor}{value}" if isinstance(value, int) else value: value for value in values}
            if word not in spelled:
                raise ValueError(f"{name}: {factor}: expected one of {', '.join(spelled)}, found {word}")
            row[factor] = spelled[word]
        return cell_of(row)

    @property
    def accelerated(self) -> bool:
        """On the accelerator; ``device`` is then the schedule."""
        return self.device != "cpu"

    @property
    def micro_steps(self) -> int:
        return 1 if self.accumulation == "once" else 2

    @property
    def quiet(self) -> bool:
        return self.accumulation == "twicequiet"

    @property
    def holds_back(self) -> bool:
        """Gradients of a micro step under ``no_sync`` stay with their rank: stages 2 and 3 keep shards alone, so they
        reduce every backward.
        """
        return self.quiet and self.stage < 2

    def policy(self) -> dict[str, Any]:
        """The policy a user would write for this cell."""
        policy: dict[str, Any] = {"stage": self.stage, "comm": {"transport": self.transport, "timeout_s": 60}}
        if self.stage == 3:
            policy["schedule"] = {"reshard_after_forward": self.reshard == "reshard"}
        if self.units != "coalesced":
            policy["units"] = {"min_numel": 0}
        if self.units == "cut":
            policy["units"]["max_numel"] = CUT_NUMEL
        if self.precision != "fp32":
            # The loss is taken in fp32, as most loops do; reduce is left unset (fp32 then), except where it is the
            # point.
            policy["precision"] = {"param": self.precision.removesuffix("reduce"), "output": "fp32"}
        if self.precision == "bf16reduce":
            policy["precision"]["reduce"] = "bf16"
        policy.setdefault("schedule", {})["prefetch"] = int(self.prefetch.removeprefix("ahead"))
        if self.buffers == "pieces":
            policy["comm"]["buffer"] = PIECES_NBYTES
        if self.arena == "reserved":
            policy["device"] = {"arena": "all"}
        if self.activation == "recomputed":
            policy["activation"] = {"checkpoint": "unit"}
        if self.activation == "onhost":
            policy["activation"] = {"tier": "host", "min_bytes": 1}
        return policy | self._placed()

    def _placed(self) -> dict[str, Any]:
        # Replicated parameters that an optimizer shards (stages 1 and 2) are on the device at every use.
        moves = self.stage in (0, 3)
        if self.tier == "ruled":
            cells = {"gradient": {"tier": "host"}, "optimizer": {"tier": "disk"}}
            weights = {"match": "*weight", **cells, **({"parameter": {"tier": "disk"}} if moves else {})}
            return {"rule": [weights, {"match": "*bias", "optimizer": {"tier": "host"}}]}
        tier, share = (self.tier[:-2], int(self.tier[-2:]) / 100) if self.tier in BY_NAME["tier"] else (self.tier, 0)
        parameter, gradient, optimizer = TIERS.get(tier, ("device", "device", "device"))
        placed: dict[str, Any] = {"gradient": {"tier": gradient}, "optimizer": {"tier": optimizer}}
        if share:
            placed["optimizer"]["device_share"] = share
        return placed | ({"parameter": {"tier": parameter}} if moves else {})


def cell_of(row: Mapping[str, Choice]) -> Cell:
    return Cell(**dict(row))  # type: ignore[arg-type]


def why_excluded(row: Mapping[str, Choice]) -> str | None:
    """Why this combination, whole or partial, is not a cell; None when nothing speaks against it."""
    if row.get("world") == 1 and row.get("transport") == "stock":
        return "a world of one moves nothing, so it has one transport"
    if row.get("reshard") == "keep" and row.get("stage", 3) != 3:
        return "parameters are resharded at stage 3 only"
    if row.get("model") == "conv" and row.get("precision", "fp32") != "fp32":
        return "torch's CPU BatchNorm wants 16-bit weights beside 16-bit statistics, and buffers are left as they are"
    return None


# ---- choosing cells

Pair = tuple[tuple[str, Choice], tuple[str, Choice]]
Exclusion = Callable[[Mapping[str, Choice]], str | None]


def pairs_of(row: Mapping[str, Choice]) -> set[Pair]:
    """Every two choices of the row, the factors in the row's order."""
    return set(itertools.combinations(row.items(), 2))


def legal_pairs(factors: Mapping[str, Sequence[Choice]], excluded: Exclusion) -> list[Pair]:
    return [
        pair
        for (left, lefts), (right, rights) in itertools.combinations(factors.items(), 2)
        for pair in itertools.product([(left, value) for value in lefts], [(right, value) for value in rights])
        if excluded(dict(pair)) is None
    ]


def pairwise(factors: Mapping[str, Sequence[Choice]], excluded: Exclusion) -> list[Row]:
    """Few rows in which every legal pair of choices occurs; the same rows every time.

    Greedy, after the row-by-row method of AETG (Cohen et al., 1997): each row starts from a pair not yet covered,
    then gives every other factor the legal choice that covers most pairs not yet covered. Exclusions must concern two
    factors each.
    """
    missing = dict.fromkeys(legal_pairs(factors, excluded))
    rows: list[Row] = []
    while missing:
        row: Row = dict(next(iter(missing)))
        for factor in sorted(set(factors) - set(row), key=lambda name: (-len(factors[name]), name)):
            row[factor] = _best_choice(row, factor, factors, excluded, missing, turn=len(rows))
        rows.append({factor: row[factor] for factor in factors})
        for pair in pairs_of(rows[-1]):
            missing.pop(pair, None)
    return rows


def _best_choice(
    row: Row,
    factor: str,
    factors: Mapping[str, Sequence[Choice]],
    excluded: Exclusion,
    missing: Mapping[Pair, None],
    *,
    turn: int,
) -> Choice:
    order = {name: place for place, name in enumerate(factors)}
    values = factors[factor]
    # Ties go to a different value each row, so that no combination is favoured by where it stands in the list.
    turned = [values[(place + turn) % len(values)] for place in range(len(values))]
    legal = [value for value in turned if excluded(row | {factor: value}) is None]
    assert legal, f"{factor}: no choice is legal beside {row}"

    def news(value: Choice) -> int:
        count = 0
        for other in row.items():
            first, second = sorted([other, (factor, value)], key=lambda choice: order[choice[0]])
            count += (first, second) in missing
        return count

    return max(legal, key=news)


def sample(count: int, seed: int) -> Iterator[Row]:
    """``count`` different legal rows of the full product, the same for the same seed."""
    draw = random.Random(seed)
    seen: set[tuple[Choice, ...]] = set()
    while len(seen) < count:
        row = {factor: draw.choice(values) for factor, values in FACTORS.items()}
        key = tuple(row.values())
        if why_excluded(row) is None and key not in seen:
            seen.add(key)
            yield row
