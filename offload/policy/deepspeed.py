"""Owns the DeepSpeed dialect: a DeepSpeed configuration read as a policy, and the list of what it asks for in vain.

`policy_layers` calls it for a file or mapping that speaks it. It never imports DeepSpeed, and never drops a key
in silence: each is translated, means what happens here anyway, is listed with what to do instead, or is an error.

Source: DeepSpeed's documentation, "DeepSpeed Configuration JSON".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offload.documents import Document, Place, complain, nearest
from offload.policy.deepspeed_keys import ALIASES, AMBIGUOUS, HONOURED, LEFT_OPEN, OTHER, enabled
from offload.policy.tables import POLICY
from offload.text import shown

__all__ = ["Argument", "IgnoredKeys", "speaks", "translate"]

_TIERS = {"cpu": "host", "nvme": "disk", "none": "device"}
_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "torch.float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfp16", "torch.bfloat16"), "bf16"),
}
#: [units] max_numel below this would split a model into crumbs, where DeepSpeed's small buckets only reduce oftener.
_LEAST_BUCKET_NUMEL = 1 << 20
_LEAST_BLOCK_NBYTES = 1 << 20
_LARGEST_SCALE = 2.0**127
#: DeepSpeed's defaults where they are not ours.
_DYNAMIC = {"growth_interval": 1000, "hysteresis": 2}
_AIO_DEFAULTS = {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "intra_op_parallelism": 1}


#: Keys that the warning names; `zprof policy check` lists them all.
_MOST_NAMED = 20


class IgnoredKeys(UserWarning):
    """A DeepSpeed configuration asks for something this project does not do; ``ignored`` says what and what instead."""

    def __init__(self, source: str, ignored: tuple[str, ...]) -> None:
        self.ignored = ignored
        names = [line.partition(":")[0].partition(" = ")[0] for line in ignored]
        keys = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
        super().__init__(f"{source}: DeepSpeed keys not honoured: {keys}; `zprof policy check` shows what to do instead")


@dataclass(frozen=True, slots=True)
class Argument:
    """What a launcher (Trainer) was told, which a DeepSpeed configuration leaves to it by "auto" or repeats.

    Attributes:
        name: of the argument, for errors.
        also: other values of the key that ask for the same.
    """

    name: str
    value: Any
    also: tuple[Any, ...] = ()

    def means(self, written: Any) -> bool:
        """Whether the key asks for what the argument says."""
        return any(_same(written, value) for value in (self.value, *self.also))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def speaks(values: Mapping[str, Any], own: frozenset[str]) -> bool:
    """Whether ``values`` are a DeepSpeed configuration: its keys and none of ours, whose names are ``own``."""
    return bool(_signs(values, own)) and not _ours(values, own)


def mixed(document: Document, own: frozenset[str]) -> None:
    """Refuse a document that speaks both dialects.

    Raises:
        PolicyError: a DeepSpeed key stands beside keys of ours.
    """
    signs, ours = _signs(document.values, own), _ours(document.values, own)
    if signs and ours:
        why = f"a DeepSpeed key next to {ours[0]}, a key of zhooks; use one kind of key, or name the DeepSpeed file in extends"
        raise complain([((key,), why) for key in signs], document)


def translate(
    values: Mapping[str, Any], *, at: Document | None = None, arguments: Mapping[str, Argument] | None = None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A policy's values for a DeepSpeed configuration, and one line for each key that is not honoured.

    Args:
        values: the configuration; "auto", as transformers and accelerate write it, is as good as unwritten.
        at: where the values came from, for the errors' file and line.
        arguments: by dotted key, what a launcher was told and does itself; "auto" takes its value.
    Raises:
        PolicyError: a key that DeepSpeed does not know either, a value it could not use, or one that contradicts an argument.
    """
    document = at or Document(POLICY, "policy", dict(values))
    read = _Reading(values)
    read.fill(arguments or {})
    zero = read.zero()
    stage = read.stage(zero)
    policy: dict[str, Any] = {} if stage is None else {"stage": stage}
    offloaded = _offload(read, 3 if stage is None else stage)
    policy |= offloaded | _activation(read) | _precision(read)
    if "optimizer" in offloaded and ("parameter" in offloaded or "param" in policy.get("precision", {})):
        # Else the parameters are their own masters and stay on the device: so does the update.
        policy["optimizer"] = {**offloaded["optimizer"], "compute": "host"}
    policy |= _sizes(read) | _schedule(read) | _host(read) | _disk(read)
    read.unread()
    if read.problems:
        raise complain(read.problems, document)
    return policy, tuple(read.ignored)


def _signs(values: Mapping[str, Any], own: frozenset[str]) -> list[str]:
    known = HONOURED[()] | OTHER[()].keys() | ALIASES[()].keys()
    typed = [key for key in ("optimizer", "scheduler") if isinstance(values.get(key), Mapping) and "type" in values[key]]
    return [key for key in values if key in known and key not in AMBIGUOUS and key not in own] + typed


def _ours(values: Mapping[str, Any], own: frozenset[str]) -> list[str]:
    return [key for key in values if key in own and key != "optimizer"]


class _Reading:
    """One configuration being read: hands out values by place, and collects problems and what is not honoured."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values: dict[Place, Any] = {}
        self._written: dict[Place, Place] = {}
        self.problems: list[tuple[Place, str]] = []
        self.ignored: list[str] = []
        # Keys that a launcher does itself.
        self._taken: set[Place] = set()
        # Of tables that are not read here, the keys that it does.
        self._leaves: dict[Place, set[Place]] = {}
        self._flatten(values, (), ())

    def _flatten(self, table: Mapping[Any, Any], place: Place, written: Place) -> None:
        for name, value in table.items():
            key = str(name)
            here = (*written, key)
            target = ALIASES.get(place, {}).get(key, (*place, key))
            if key not in HONOURED[place] and key not in OTHER.get(place, {}) and target == (*place, key):
                if not key.startswith(("_", "$")):
                    self.problems.append((here, _unknown(key, place)))
            elif target in self._written and value != "auto" and self.get(target) not in (None, value):
                was = ".".join(self._written[target])
                self.problems.append((here, f"another spelling of {was}, which is also set; keep one of them"))
            else:
                self._values[target], self._written[target] = value, here
                self._open(target, value)

    def _open(self, place: Place, value: object) -> None:
        """Go into a table whose keys are known, one by one."""
        if place not in HONOURED or value in ("auto", None) or (isinstance(value, bool) and place[0] == "zero_optimization"):
            return
        if isinstance(value, Mapping):
            self._flatten(value, place, self._written[place])
        else:
            self.refuse(place, "a table")

    def fill(self, arguments: Mapping[str, Argument]) -> None:
        """Put a launcher's arguments where the configuration says "auto", and refuse what contradicts them."""
        for key, argument in arguments.items():
            place = tuple(key.split("."))
            known = max((end for end in range(1, len(place) + 1) if place[:end] in self._values), default=0)
            written: Any = self._values.get(place[:known])
            for name in place[known:]:
                written = written.get(name) if isinstance(written, Mapping) else None
            if written is None:
                continue
            if written == "auto" and known == len(place):
                self._values[place] = argument.value
            elif written != "auto" and not argument.means(written):
                found = f"{shown(written)}, but {argument.name} = {shown(argument.value)}"
                where = (*self._written[place[:known]], *place[known:])
                self.problems.append((where, f'expected "auto" or the launcher\'s argument, found {found}'))
            if known == len(place):
                self._taken.add(place)
            else:
                self._leaves.setdefault(place[:known], set()).add(place[known:])

    def get(self, place: Place) -> Any:
        """The value written at ``place``; None where there is none or it is "auto"."""
        value = self._values.get(place)
        return None if isinstance(value, str) and value == "auto" else value

    def refuse(self, place: Place, expected: str) -> None:
        self.problems.append((self._written[place], f"expected {expected}, found {shown(self._values[place])}"))

    def ignore(self, place: Place, instead: str) -> None:
        value = self._values[place]
        number = f"{value:g}" if isinstance(value, float) else shown(value)
        text = "" if isinstance(value, Mapping) else f" = {number}"
        self.ignored.append(f"{'.'.join(self._written[place])}{text}: {instead}")

    def _typed(self, place: Place, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(place)
        if value is None or fits(value):
            return value
        self.refuse(place, f'{expected} or "auto"')
        return None

    def flag(self, *place: str) -> bool | None:
        value: bool | None = self._typed(place, lambda value: isinstance(value, bool), "true or false")
        return value

    def number(self, *place: str) -> int | None:
        value = self._typed(place, _is_count, "a whole number, 0 or more")
        return None if value is None else int(value)

    def bounded(self, low: float, high: float, *place: str) -> float | None:
        def fits(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high

        value = self._typed(place, fits, f"a number from {low:g} to {high:g}")
        return None if value is None else float(value)

    def choice(self, choices: Mapping[str, str], *place: str) -> str | None:
        fits = f"one of {', '.join(choices)}"
        value = self._typed(place, lambda value: isinstance(value, str) and value in choices, fits)
        return None if value is None else choices[value]

    def path(self, *place: str) -> str | None:
        def fits(value: object) -> bool:
            return isinstance(value, str) and 0 < len(value) <= 4096 and value.isprintable()

        value: str | None = self._typed(place, fits, "a path")
        return value

    def zero(self) -> object:
        """The value of zero_optimization: a table, or the old true or false."""
        return self._values.get(("zero_optimization",))

    def stage(self, zero: object) -> int | None:
        """The stage; None leaves it to the policy's default."""
        if isinstance(zero, str) and zero == "auto":
            return None
        if not isinstance(zero, Mapping):
            return 1 if zero is True else 0
        place = ("zero_optimization", "stage")
        if self._values.get(place) == "auto":
            return None
        stage = self._typed(place, lambda value: _is_count(value) and value <= 3, "0, 1, 2 or 3")
        return int(stage or 0)

    def unread(self) -> None:
        """List the keys that have no counterpart and ask for something else than what happens here."""
        fp16, bf16 = (self.get((name, "enabled")) for name in ("fp16", "bf16"))
        for place, value in self._values.items():
            other = OTHER.get(place[:-1], {}).get(place[-1])
            off = (place[0] == "fp16" and fp16 is not True) or (place[0] == "bf16" and bf16 is not True)
            if place in self._taken:
                continue
            if self._automatic(place):
                self._left_open(place)
                continue
            if other is None or off or self.get(place) is None or not enabled(value):
                continue
            if place in self._leaves and isinstance(value, Mapping):
                for left in _leaves(value):
                    if left not in self._leaves[place] and left[-1] not in _LEFT_TO_ARGUMENTS:
                        self.ignored.append(f"{'.'.join((*self._written[place], *left))}: set it with the launcher's arguments")
                continue
            if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in other.same):
                self.ignore(place, other.instead)


    def _automatic(self, place: Place) -> bool:
        """Whether it is left open; null, which DeepSpeed does not take there, decides nothing either."""
        if place not in self._values:
            return False
        value = self._values[place]
        return (isinstance(value, str) and value == "auto") or (value is None and place[-1] in ("enabled", "stage"))

    def _left_open(self, place: Place) -> None:
        """List a key that was left to a launcher, where its value would make another run of it."""
        written = LEFT_OPEN.get(place)
        decided = any(self.get((name, "enabled")) is True for name in ("fp16", "bf16")) and place[0] in ("fp16", "bf16")
        if written is not None and not decided:
            self.ignore(place, f"left to transformers or accelerate, which are not used here; {written}")


#: Written beside what a launcher does; they mean what it does anyway, or nothing where they say "auto".
_LEFT_TO_ARGUMENTS = frozenset({"torch_adam", "fused"})


def _leaves(table: Mapping[str, Any], above: Place = ()) -> Iterator[Place]:
    """The places of a table's values, "auto" left out."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        elif value != "auto":
            yield (*above, key)


def _is_count(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and value >= 0


def _unknown(key: str, place: Place) -> str:
    known = HONOURED[place] | OTHER.get(place, {}).keys()
    near = nearest(key, known)
    if near is None:
        elsewhere = {name: table for table in HONOURED for name in HONOURED[table] | OTHER.get(table, {}).keys()}
        near = nearest(key, elsewhere, 0.8)
        near = near and ".".join((*elsewhere[near], near))
    return f"DeepSpeed has no such key{f'; did you mean {near}?' if near else ' here'}"


def _offload(read: _Reading, stage: int) -> dict[str, Any]:
    """The tiers: offload_param is the parameters', offload_optimizer the states', the masters' and the gradients'."""
    policy: dict[str, Any] = {}
    found = {cell: _offload_tier(read, cell) for cell in ("param", "optimizer")}
    for cell, tier in found.items():
        place = ("zero_optimization", f"offload_{cell}")
        if tier in (None, "device"):
            continue
        if cell == "param" and stage < 3:
            _ignore_offload(read, place, "DeepSpeed, too, offloads parameters only at stage 3")
        elif cell == "param":
            policy["parameter"] = {"tier": tier}
        elif stage == 0:
            _ignore_offload(read, place, "DeepSpeed, too, offloads nothing at stage 0")
        else:
            policy |= {"gradient": {"tier": tier}, "optimizer": {"tier": tier} | _divided(read, stage)}
    return policy


def _divided(read: _Reading, stage: int) -> dict[str, Any]:
    """ratio is the share of the states that leaves the device, at stage 3."""
    place = ("zero_optimization", "offload_optimizer", "ratio")
    away = read.bounded(0.0, 1.0, *place)
    if away is None or away == 1:
        return {}
    if stage < 3:
        read.ignore(place, "DeepSpeed, too, divides the states only at stage 3")
        return {}
    return {"device_share": round(1 - away, 12)}


def _ignore_offload(read: _Reading, place: Place, why: str) -> None:
    # The old spelling is a key beside the table, not in it.
    old = ("zero_optimization", "cpu_offload" if place[1] == "offload_optimizer" else "cpu_offload_param")
    for written in ((*place, "device"), old, (old[0], "cpu_offload_params")):
        if read.get(written) not in (None, False):
            read.ignore(written, why)


def _offload_tier(read: _Reading, cell: str) -> str | None:
    tier = read.choice(_TIERS, "zero_optimization", f"offload_{cell}", "device")
    names = ("cpu_offload",) if cell == "optimizer" else ("cpu_offload_param", "cpu_offload_params")
    old = [read.flag("zero_optimization", name) for name in names]
    return tier or ("host" if True in old else None)


def _activation(read: _Reading) -> dict[str, Any]:
    if read.flag("activation_checkpointing", "cpu_checkpointing"):
        return {"activation": {"tier": "host", "checkpoint": "unit"}}
    return {}


def _precision(read: _Reading) -> dict[str, Any]:
    precision: dict[str, Any] = {}
    fp16, bf16 = read.flag("fp16", "enabled"), read.flag("bf16", "enabled")
    if fp16 and bf16:
        read.refuse(("bf16", "enabled"), "fp16 or bf16, not both enabled; set one to false")
    elif fp16 or bf16:
        precision["param"] = "fp16" if fp16 else "bf16"
    cast = read.flag("fp16", "auto_cast")
    if fp16 and cast is not None:
        precision["cast_inputs"] = cast
    scaled = _loss_scale(read)
    precision |= scaled if fp16 and not bf16 else {}
    reduce = read.choice(_DTYPES, "communication_data_type")
    if reduce:
        precision["reduce"] = reduce
    accumulated = read.choice(_DTYPES, "data_types", "grad_accum_dtype")
    if accumulated not in (None, "fp32"):
        read.ignore(("data_types", "grad_accum_dtype"), "gradients accumulate in the dtype of the masters")
    return {"precision": precision} if precision else {}


def _loss_scale(read: _Reading) -> dict[str, Any]:
    """DeepSpeed scales wherever fp16 is on; 0 is its word for dynamic."""
    fixed = read.bounded(0.0, _LARGEST_SCALE, "fp16", "loss_scale")
    if fixed:
        return {"loss_scale": fixed}
    scaling: dict[str, Any] = {"loss_scale": "dynamic", **_DYNAMIC}
    power = read.bounded(0.0, 127.0, "fp16", "initial_scale_power")
    window = read.bounded(1.0, 2.0**31 - 1, "fp16", "loss_scale_window")
    hysteresis = read.bounded(1.0, 1024.0, "fp16", "hysteresis")
    least = read.bounded(2.0**-126, _LARGEST_SCALE, "fp16", "min_loss_scale")
    written = {
        "initial_scale": None if power is None else 2.0**power,
        "growth_interval": None if window is None else int(window),
        "hysteresis": None if hysteresis is None else int(hysteresis),
        "min_scale": least,
    }
    return scaling | {key: value for key, value in written.items() if value is not None}


def _sizes(read: _Reading) -> dict[str, Any]:
    """Both buckets bound the elements of one collective, which here is a segment."""
    found: list[int] = []
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        numel = read.number("zero_optimization", key)
        if numel is not None and numel < _LEAST_BUCKET_NUMEL:
            read.ignore(("zero_optimization", key), "a collective moves a whole unit; set [units] max_numel to split it")
        elif numel is not None:
            found.append(min(numel, 1 << 40))
    return {"units": {"max_numel": min(found)}} if found else {}


def _schedule(read: _Reading) -> dict[str, Any]:
    schedule: dict[str, Any] = {}
    place = ("zero_optimization", "stage3_prefetch_bucket_size")
    ahead = read.number(*place)
    if ahead == 0:
        schedule["prefetch"] = 0
    elif ahead is not None:
        read.ignore(place, "prefetch counts units, not elements; set [schedule] prefetch")
    if read.flag("zero_optimization", "overlap_comm") is False:
        schedule["max_reductions"] = 1
    return {"schedule": schedule} if schedule else {}


def _host(read: _Reading) -> dict[str, Any]:
    """Pinning: true is our auto, which pins where there is CUDA; DeepSpeed too takes true where there is none."""
    places = [
        ("zero_optimization", "offload_param", "pin_memory"),
        ("zero_optimization", "offload_optimizer", "pin_memory"),
        ("zero_optimization", "cpu_offload_use_pin_memory"),
    ]
    wanted = [read.flag(*place) for place in places]
    if True in wanted and False in wanted:
        read.ignore(places[wanted.index(False)], "one pool serves both; what is pinned for one is pinned for the other")
    return {"host": {"pin": False}} if False in wanted and True not in wanted else {}


def _disk(read: _Reading) -> dict[str, Any]:
    disk: dict[str, Any] = {}
    tables = [("zero_optimization", f"offload_{cell}") for cell in ("param", "optimizer")]
    # A path counts before one beside another device, which DeepSpeed does not use.
    tables.sort(key=lambda table: read.get((*table, "device")) != "nvme")
    paths = [((*table, "nvme_path"), path) for table in tables if (path := read.path(*table, "nvme_path")) is not None]
    if paths:
        disk["path"] = paths[0][1]
        for place, path in paths[1:]:
            if path != disk["path"]:
                read.ignore(place, f"one scratch file serves both; it is in {shown(disk['path'])}")
    written = {key: read.number("aio", key) for key in _AIO_DEFAULTS}
    if any(value is not None for value in written.values()):
        aio = {key: _AIO_DEFAULTS[key] if value is None else value for key, value in written.items()}
        wanted = max(aio["block_size"], _LEAST_BLOCK_NBYTES)
        disk["block"] = min(-(-wanted // 4096) * 4096, 1 << 40)
        # As many bytes in flight; requests here are larger where DeepSpeed's are small.
        in_flight = aio["block_size"] * aio["queue_depth"] * max(aio["thread_count"], aio["intra_op_parallelism"])
        disk["threads"] = max(1, min(64, in_flight // disk["block"]))
    return {"disk": disk} if disk else {}
