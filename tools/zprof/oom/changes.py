"""Owns the changes that could have let it fit: each what to write, what it costs, and what it makes of the bytes held.

`zprof.oom.fit` tries them, alone and together. It reads no trace and no machine, and where the recorded bytes do not say what
a change saves, the change is not offered.

Note: [On the way]
    What is stored on another tier is still needed where it is used: a buffer for the unit in use, those fetched ahead and the
    one on its way back. A change that moves a cell leaves so many of its largest units behind. A [budget] counts less: of the
    device nothing that is on its way to another tier, and of the host only buffers of what the disk has of the unit in use.
    Before it would be exceeded, nothing is fetched ahead, and what is being written back is waited for.

Note: [What a change costs]
    Changes are compared by the time they add to a step: bytes over the bandwidth of their way, a forward that is computed
    again. Where neither the run nor ``zprof bench`` says how fast that is, a usual machine's figures stand in, which only order
    the changes and are never shown. A change that alters the numbers computed comes after all that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.text import as_size, counted
from zprof.oom.held import Held, bytes_in, halved, keys, largest_alone, less, moved, partitioned

__all__ = ["ALLOCATOR", "IN_USE", "Change", "Pace", "Plight", "changes"]

#: The key of the buffers that a step's units pass through, where a [budget] counts them.
IN_USE = "(unit in use)"
#: What a change of the allocator's settings is about.
ALLOCATOR = "allocator"
#: Bytes a second at which a usual CPU updates states, and a forward makes activations.
_UPDATED, _MADE = 5e9, 2e9
#: Of a forward and its backward, what two of half the size take more.
_HALVED = 0.1


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the run was, or a usual machine is.

    Attributes:
        gather, host, disk: bytes a second between ranks, from the device to the host, and to the disk.
        forward_ns: a forward took; None where nobody knows.
    """

    gather: float = 10e9
    host: float = 10e9
    disk: float = 1e9
    forward_ns: float | None = None

    def moving(self, nbytes: float, to: str) -> float:
        """Nanoseconds of bringing so many bytes there, or back."""
        return nbytes * 1e9 / {"gather": self.gather, "host": self.host, "disk": self.disk}[to]

    def computing_again(self, activations: int) -> float:
        """Nanoseconds of a forward, which makes so many bytes."""
        return self.forward_ns if self.forward_ns is not None else activations * 1e9 / _MADE


@dataclass(frozen=True, slots=True)
class Plight:
    """A failed request and what stood in its way.

    Attributes:
        held: bytes at that moment.
        pool: the tiers that share what ran out: ("device",) of a GPU, ("device", "host") of a process on a CPU.
        short: bytes that were lacking; None where nobody knows.
        world: ranks. policy: its values as a policy file has them, None without zhooks.
        units: unit -> its bytes, gathered whole.
        free: tier -> bytes it could still take, for what would move there; None where nothing bounds it.
        idle: bytes that were freed and that the allocator, torch's on CUDA or else malloc, did not give back.
        shared: the device is a CPU, so that device and host are the same memory.
        step: the fullest moments of what a whole step needs; none where no such step was seen.
        room: bytes that the pool can take in all, of those that are recorded; None where nobody knows.
        blocks: that the model has; 0 where nobody knows.
        pace: how fast the run was.
        budget: what ran out is a [budget]; see Note: [On the way].
    """

    held: Held
    pool: tuple[str, ...]
    short: int | None = None
    world: int = 1
    policy: Mapping[str, Any] | None = None
    units: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int | None] | None = None
    idle: int = 0
    shared: bool = False
    step: tuple[Held, ...] = ()
    room: int | None = None
    blocks: int = 0
    pace: Pace = Pace()
    budget: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to do otherwise.

    Attributes:
        what: the lines of a policy file, or what else to do.
        price: in words. cost: whether the numbers computed change, and nanoseconds a step; see Note: [What a change costs].
        about: what it changes; of two changes about one thing only one can be made.
        at_most: the true saving may be smaller, for a reason the price names.
        keys: what to write into the policy, table by table; None of what is no policy's.
        batches: so many micro-batches in the place of one.
    """

    what: str
    price: str
    cost: tuple[bool, float]
    about: frozenset[str]
    after: Callable[[Held], Held]
    at_most: bool = False
    keys: Mapping[str, Any] | None = None
    batches: int = 1


#: What makes memory usable that an allocator keeps, and at what price.
_ALLOCATORS = {
    "cuda": (
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "none at run time: memory that the allocator had reserved and could not use becomes usable, if it was fragmented",
    ),
    "malloc": (
        "MALLOC_MMAP_THRESHOLD_=1048576 in the environment",
        "blocks of 1 MiB and more come from the system each time and go back at once, which costs kernel time",
    ),
}


def changes(plight: Plight) -> Iterator[Change]:
    """Every change that there is for this policy, whether it helps or not."""
    if plight.idle:
        what, price = _ALLOCATORS["malloc" if plight.shared else "cuda"]
        yield Change(what, price, (False, 0), _about(ALLOCATOR), lambda held: held, at_most=True)
    if plight.policy is None:
        yield from _without_zhooks(plight)
    else:
        yield from _schedule(plight, plight.policy)
        yield from _stages(plight, plight.policy)
        yield from _tiers(plight, plight.policy)
        yield from _activations(plight, plight.policy)
        yield from _bf16(plight, plight.policy)
    yield from _half_batch(plight)


def _schedule(plight: Plight, policy: Mapping[str, Any]) -> Iterator[Change]:
    """Units gathered ahead of use: of those that are gathered, the smallest, so that no more is promised than they hold."""
    ahead = _value(policy, "schedule", "prefetch", 1)
    gathered = sorted(_gathered(plight, policy).items(), key=lambda pair: pair[1])
    fetched = dict(gathered[: min(ahead, len(gathered) - 1)]) if ahead and len(gathered) > 1 else {}
    if fetched and "device" in plight.pool:
        yield Change(
            "[schedule] prefetch = 0",
            "gathers are no longer hidden behind compute",
            (False, plight.pace.moving(2 * sum(gathered_nbytes for _, gathered_nbytes in gathered), "gather")),
            _about("prefetch"),
            less("parameter", "device", fetched),
            keys={"schedule": {"prefetch": 0}},
        )


def _stages(plight: Plight, policy: Mapping[str, Any]) -> Iterator[Change]:
    stage = _stage(policy)
    if plight.world < 2:
        return
    for higher in range(stage + 1, 4):
        cells = ["optimizer"] * (stage < 1 <= higher) + ["gradient"] * (stage < 2 <= higher) + ["parameter"] * (higher == 3)
        flying = _in_flight(plight, policy) if higher == 3 else 0
        if higher == 3 and not flying:
            continue  # What would stay gathered is not known.
        price = {
            1: f"none: each of {plight.world} ranks updates its share",
            2: "gradients are reduced in every backward",
            3: f"parameters are gathered in every pass; {as_size(flying)} stay for units in flight",
        }[higher]
        after = partitioned(tuple(cells), plight.world, flying)
        # Gathered once a step, or in forward and backward.
        moved_nbytes = bytes_in(plight.held, ("device",), "parameter") * (2 if higher == 3 else 1)
        cost = (False, plight.pace.moving(moved_nbytes, "gather") + higher)
        yield Change(f"stage = {higher}", price, cost, _about("stage"), after, keys={"stage": higher})


def _tiers(plight: Plight, policy: Mapping[str, Any]) -> Iterator[Change]:
    """Cells that are stored elsewhere. Where device and host are one memory, only what goes to disk leaves it."""
    often = {"optimizer": "read and written once per step", "gradient": "written once per backward and read once per step"}
    for cell in ("optimizer", "gradient", *(("parameter",) if _stage(policy) in (0, 3) else ())):
        now = _value(policy, cell, "tier", "device")
        # What is gathered stays on the device wherever it is stored, and in a world of one it then has to be gathered.
        gathered = _gathered(plight, policy) if cell == "parameter" and now == "device" else {}
        flying = _in_flight(plight, policy) if cell == "parameter" and now == "device" and plight.world == 1 else 0
        stored = {key: nbytes - gathered.get(key, 0) for key, nbytes in keys(plight.held, cell, now).items()}
        at, ahead = sum(stored.values()), _value(policy, "schedule", "prefetch", 1)
        # At stage 0 parameters may be stored elsewhere, at 1 and 2 not.
        about = _about(f"{cell} tier", *(["stage"] if cell == "parameter" and _stage(policy) == 0 else []))
        for to in ("host", "disk"):
            if now in plight.pool and at > 0 and to not in plight.pool and to != now:
                price = f"{as_size(at)} {often.get(cell, 'read in every forward and backward')}, {_way(now, to)}"
                cost, staged = (False, plight.pace.moving(2 * at, to)), _staged(plight, stored, now, to, ahead)
                after = moved(cell, now, to, gathered, {**staged, now: staged.get(now, 0) + flying})
                yield Change(f'[{cell}] tier = "{to}"', price, cost, about, after, keys={cell: {"tier": to}})
    yield from _all_on_the_tier(plight, policy)
    yield from _on_the_host(plight, policy)


def _all_on_the_tier(plight: Plight, policy: Mapping[str, Any]) -> Iterator[Change]:
    """The share of the states that stays on the device, beside the tier that has the others."""
    share, tier = (_value(policy, "optimizer", key, default) for key, default in (("device_share", 0), ("tier", "device")))
    stored = keys(plight.held, "optimizer", "device") if share else {}
    at, ahead = sum(stored.values()), _value(policy, "schedule", "prefetch", 1)
    if at and "device" in plight.pool and tier not in plight.pool:
        yield Change(
            "[optimizer] device_share = 0",
            f"{as_size(at)} read and written once per step, {_way('device', tier)}",
            (False, plight.pace.moving(2 * at, tier)),
            _about("optimizer tier"),
            moved("optimizer", "device", tier, flying=_staged(plight, stored, "device", tier, ahead)),
            keys={"optimizer": {"device_share": 0.0}},
        )


def _on_the_host(plight: Plight, policy: Mapping[str, Any]) -> Iterator[Change]:
    """States and gradients on the host and the update there too: then no states travel, and none are staged."""
    cells = ("optimizer", "gradient")
    stored = [bytes_in(plight.held, ("device",), cell) for cell in cells]
    elsewhere = any(_value(policy, cell, "tier", "device") != "device" for cell in cells)
    if stored[0] and "device" in plight.pool and not plight.shared and not elsewhere:
        yield Change(
            '[gradient] tier = "host", [optimizer] tier = "host" and compute = "host"',
            f"{as_size(stored[1])} of gradients out once per backward, parameters back once per step; the host computes the "
            "update",
            (False, plight.pace.moving(2 * stored[1], "host") + 2 * stored[0] * 1e9 / _UPDATED),
            _about("optimizer tier", "gradient tier"),
            lambda held: moved("gradient", "device", "host")(moved("optimizer", "device", "host")(held)),
            keys={"gradient": {"tier": "host"}, "optimizer": {"tier": "host", "compute": "host"}},
        )


def _staged(plight: Plight, stored: Mapping[str, int], now: str, to: str, ahead: int) -> dict[str, int]:
    """Bytes on the way between tiers, by the tier they are on: the unit in use, those fetched ahead, and the one before on its
    way back; see Note: [On the way]."""
    sizes = sorted(stored.values(), reverse=True)
    if not plight.budget:
        return {now: sum(sizes[: 2 + ahead])}
    return {"host": sum(sizes[:1])} if to == "disk" else {}


def _activations(plight: Plight, policy: Mapping[str, Any]) -> Iterator[Change]:
    now = _value(policy, "activation", "tier", "device")
    held = {key: nbytes for (what, tier, key), nbytes in plight.held.items() if what == "activation" and tier in plight.pool}
    total = sum(held.values())
    if _value(policy, "activation", "checkpoint", "none") == "none" and len(held) > 1:
        yield Change(
            '[activation] checkpoint = "unit"',
            f"every unit's forward is recomputed in backward; the inputs of {counted(len(held), 'unit')} stay",
            (False, plight.pace.computing_again(total)),
            _about("activation"),
            largest_alone("activation", plight.pool),
            at_most=True,
            keys={"activation": {"checkpoint": "unit"}},
        )
    for to in ("host", "disk"):
        if total and to != now and to not in plight.pool and now != "disk":
            price = f"{as_size(total)} out in forward and back in backward, {_way(now, to)}; tensors below min_bytes stay"
            after, cost = moved("activation", now, to), (False, plight.pace.moving(2 * total, to))
            what, written = f'[activation] tier = "{to}"', {"activation": {"tier": to}}
            yield Change(what, price, cost, _about("activation"), after, at_most=True, keys=written)


def _bf16(plight: Plight, policy: Mapping[str, Any]) -> Iterator[Change]:
    if _value(policy, "precision", "param", None) is None and "device" in plight.pool:
        yield Change(
            '[precision] param = "bf16"',
            "8 bits of mantissa in compute, masters as they are; halves what is in fp32 now",
            (True, 0),
            _about("precision"),
            halved(("activation",)),
            at_most=True,
            keys={"precision": {"param": "bf16"}},
        )


def _half_batch(plight: Plight) -> Iterator[Change]:
    activations = bytes_in(plight.held, plight.pool, "activation")
    gathered = _gathered(plight, plight.policy) if plight.policy is not None else {}
    again = plight.pace.moving(2 * sum(gathered.values()), "gather")
    yield Change(
        "half the batch",
        "two backward passes per step for the same gradients; what does not grow with the batch stays",
        (False, 3 * _HALVED * plight.pace.computing_again(activations) + again),
        _about("batch"),
        halved(("activation", "temporary")),
        at_most=True,
        keys={},
        batches=2,
    )


def _without_zhooks(plight: Plight) -> Iterator[Change]:
    """What plain torch offers, and what zhooks would do."""
    cells = ("parameter", "gradient", "optimizer")
    if plight.world > 1 and any(bytes_in(plight.held, ("device",), cell) for cell in cells) and "device" in plight.pool:
        yield Change(
            "zhooks.attach(model)",
            f"stage 3: each of {plight.world} ranks holds its share; the units in use are on top",
            (False, plight.pace.moving(2 * bytes_in(plight.held, ("device",), "parameter"), "gather")),
            _about("stage"),
            partitioned(cells, plight.world, 0),
            at_most=True,
            keys={"stage": 3},
        )
    blocks = [key for (what, tier, key), _ in plight.held.items() if what == "activation" and tier in plight.pool]
    activations = bytes_in(plight.held, plight.pool, "activation")
    if len(blocks) > 1:
        yield Change(
            "torch.utils.checkpoint around each block",
            f"forward is recomputed in backward; the inputs of {plight.blocks or len(blocks)} blocks stay",
            (False, plight.pace.computing_again(activations)),
            _about("activation"),
            largest_alone("activation", plight.pool),
            at_most=True,
        )
    for to in ("host", "disk"):
        states = keys(plight.held, "optimizer", "device")
        at = sum(states.values())
        if at and "device" in plight.pool and to not in plight.pool:
            what = f'zhooks.attach(model, policy={{"optimizer": {{"tier": "{to}"}}}})'
            price = f"{as_size(at)} read and written once per step, {_way('device', to)}"
            cost, staged = (False, plight.pace.moving(2 * at, to)), _staged(plight, states, "device", to, 1)
            after = moved("optimizer", "device", to, flying=staged)
            written = {"stage": 3, "optimizer": {"tier": to}}
            yield Change(what, price, cost, _about("optimizer tier"), after, keys=written)
    if not plight.shared:
        yield Change(
            "torch.autocast(dtype=torch.bfloat16) around forward",
            "8 bits of mantissa in compute; halves what is in fp32 now",
            (True, 0),
            _about("precision"),
            halved(("activation",)),
            at_most=True,
        )


def _gathered(plight: Plight, policy: Mapping[str, Any]) -> dict[str, int]:
    """Units that are gathered and will be released: there is as much for them on the device as whole they are."""
    if _stage(policy) != 3 or (plight.world == 1 and _value(policy, "parameter", "tier", "device") == "device"):
        return {}
    on_device = keys(plight.held, "parameter", "device").items()
    return {key: plight.units[key] for key, nbytes in on_device if 0 < plight.units.get(key, 0) <= nbytes}


def _in_flight(plight: Plight, policy: Mapping[str, Any]) -> int:
    """Gathered units at once: the one in use and those fetched ahead."""
    return sum(sorted(plight.units.values(), reverse=True)[: 1 + _value(policy, "schedule", "prefetch", 1)])


def _about(*what: str) -> frozenset[str]:
    return frozenset(what)


def _stage(policy: Mapping[str, Any]) -> int:
    stage = policy.get("stage", 3)
    return stage if isinstance(stage, int) else 3


def _value(policy: Mapping[str, Any], table: str, key: str, default: Any) -> Any:
    held = policy.get(table)
    return held.get(key, default) if isinstance(held, Mapping) else default


def _way(now: str, to: str) -> str:
    return f"from {now} to {to} and back"
