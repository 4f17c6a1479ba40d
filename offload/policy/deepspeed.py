"""A DeepSpeed configuration read as a policy, and the list of what it asks for that has no counterpart.

Each key is translated, means what happens here anyway, is listed with what to do instead, or is an error.

Source: DeepSpeed's documentation, "DeepSpeed Configuration JSON".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offload.documents import Document, Place, complain, nearest
from offload.policy.deepspeed_keys import ALIASES, AMBIGUOUS, HONOURED, LEFT_OPEN, OTHER, TAKES, enabled
from offload.policy.tables import POLICY
from offload.text import shown

__all__ = ["Argument", "IgnoredKeys", "speaks", "translate"]

#: [units] max_numel below this would split a model into crumbs, where DeepSpeed's small buckets only reduce oftener.
_LEAST_BUCKET_NUMEL = 1 << 20
_LEAST_BLOCK_NBYTES = 1 << 20
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
    policy: dict[str, Any] = {}
    zero = read.written("zero_optimization")
    if not isinstance(zero, Mapping) and zero != "auto":
        policy["stage"] = 1 if zero is True else 0
    elif zero != "auto" and read.written("zero_optimization.stage") != "auto":
        policy["stage"] = read("zero_optimization.stage") or 0
    policy |= _offload(read, policy.get("stage", 3))
    if read("activation_checkpointing.cpu_checkpointing"):
        policy["activation"] = {"tier": "host", "checkpoint": "unit"}
    policy |= _precision(read)
    if "optimizer" in policy and ("parameter" in policy or "param" in policy.get("precision", {})):
        # Else the parameters are their own masters and stay on the device: so does the update.
        policy["optimizer"]["compute"] = "host"
    policy |= _sizes(read) | _host(read) | _disk(read)
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
    """One configuration being read: hands out values by dotted key, and collects problems and what is not honoured."""

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
            elif target in self._written and value != "auto" and self._values[target] not in (None, "auto", value):
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

    def written(self, key: str) -> Any:
        """What is written there, "auto" too."""
        return self._values.get(tuple(key.split(".")))

    def get(self, key: str) -> Any:
        """The value as it is written; None where there is none or it is "auto"."""
        value = self.written(key)
        return None if isinstance(value, str) and value == "auto" else value

    def __call__(self, key: str) -> Any:
        """What the value stands for here; None, too, where the key does not take it, which is a problem."""
        *table, name = key.split(".")
        takes, value = TAKES[tuple(table)][name], self.get(key)
        assert takes is not None, f"{key} is a table"
        if value is None or takes.fits(value):
            return None if value is None else takes.means(value)
        self.refuse((*table, name), f'{takes.expected} or "auto"')
        return None

    def refuse(self, place: Place, expected: str) -> None:
        self.problems.append((self._written[place], f"expected {expected}, found {shown(self._values[place])}"))

    def ignore(self, key: str, instead: str) -> None:
        self._list(tuple(key.split(".")), instead)

    def _list(self, place: Place, instead: str) -> None:
        value = self._values[place]
        number = f"{value:g}" if isinstance(value, float) else shown(value)
        text = "" if isinstance(value, Mapping) else f" = {number}"
        self.ignored.append(f"{'.'.join(self._written[place])}{text}: {instead}")

    def unread(self) -> None:
        """List the keys that have no counterpart and ask for something else than what happens here."""
        on = {name: self.get(f"{name}.enabled") is True for name in ("fp16", "bf16")}
        for place, value in self._values.items():
            if place in self._taken:
                continue
            # Null, which DeepSpeed does not take there, decides nothing either.
            if value == "auto" or (value is None and place[-1] in ("enabled", "stage")):
                decided = place[0] in on and any(on.values())
                if place in LEFT_OPEN and not decided:
                    # A launcher's value would make another run of it.
                    left = "left to transformers or accelerate, which are not used here"
                    self._list(place, f"{left}; {LEFT_OPEN[place]}")
                continue
            other = OTHER.get(place[:-1], {}).get(place[-1])
            if other is None or value is None or not on.get(place[0], True) or not enabled(value):
                continue
            if place in self._leaves and isinstance(value, Mapping):
                for left_place in _leaves(value):
                    if left_place not in self._leaves[place] and left_place[-1] not in _LEFT_TO_ARGUMENTS:
                        dotted = ".".join((*self._written[place], *left_place))
                        self.ignored.append(f"{dotted}: set it with the launcher's arguments")
            elif not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in other.same):
                self._list(place, other.instead)


#: Written beside what a launcher does; they mean what it does anyway, or nothing where they say "auto".
_LEFT_TO_ARGUMENTS = frozenset({"torch_adam", "fused"})


def _leaves(table: Mapping[str, Any], above: Place = ()) -> Iterator[Place]:
    """The places of a table's values, "auto" left out."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*above, key))
        elif value != "auto":
            yield (*above, key)


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
    olds = {"param": ("cpu_offload_param", "cpu_offload_params"), "optimizer": ("cpu_offload",)}
    for cell, names in olds.items():
        device = f"zero_optimization.offload_{cell}.device"
        old = [f"zero_optimization.{name}" for name in names]
        here = [read(key) for key in old]
        tier = read(device) or ("host" if True in here else "device")
        if tier == "device":
            continue
        if stage < (3 if cell == "param" else 1):
            what = "parameters only at stage 3" if cell == "param" else "nothing at stage 0"
            for key in (device, *old):
                if read.get(key) not in (None, False):
                    read.ignore(key, f"DeepSpeed, too, offloads {what}")
        elif cell == "param":
            policy["parameter"] = {"tier": tier}
        else:
            policy |= {"gradient": {"tier": tier}, "optimizer": {"tier": tier}}
            # The share of the states that leaves the device.
            away = read("zero_optimization.offload_optimizer.ratio")
            if away is not None and away != 1 and stage < 3:
                read.ignore("zero_optimization.offload_optimizer.ratio", "DeepSpeed, too, divides the states only at stage 3")
            elif away is not None and away != 1:
                policy["optimizer"]["device_share"] = round(1 - away, 12)
    return policy


def _precision(read: _Reading) -> dict[str, Any]:
    precision: dict[str, Any] = {}
    fp16, bf16 = read("fp16.enabled"), read("bf16.enabled")
    if fp16 and bf16:
        read.refuse(("bf16", "enabled"), "fp16 or bf16, not both enabled; set one to false")
    elif fp16 or bf16:
        precision["param"] = "fp16" if fp16 else "bf16"
    cast = read("fp16.auto_cast")
    if fp16 and cast is not None:
        precision["cast_inputs"] = cast
    # DeepSpeed scales wherever fp16 is on; 0 is its word for dynamic.
    scaling: dict[str, Any] = {"loss_scale": read("fp16.loss_scale")}
    if not scaling["loss_scale"]:
        power, window = read("fp16.initial_scale_power"), read("fp16.loss_scale_window")
        hysteresis, least = read("fp16.hysteresis"), read("fp16.min_loss_scale")
        scaling = {"loss_scale": "dynamic", **_DYNAMIC}
        scaling |= {} if power is None else {"initial_scale": 2.0**power}
        scaling |= {} if window is None else {"growth_interval": int(window)}
        scaling |= {} if hysteresis is None else {"hysteresis": int(hysteresis)}
        scaling |= {} if least is None else {"min_scale": least}
    precision |= scaling if fp16 and not bf16 else {}
    reduce = read("communication_data_type")
    if reduce:
        precision["reduce"] = reduce
    if read("data_types.grad_accum_dtype") not in (None, "fp32"):
        read.ignore("data_types.grad_accum_dtype", "gradients accumulate in the dtype of the masters")
    return {"precision": precision} if precision else {}


def _sizes(read: _Reading) -> dict[str, Any]:
    """Buckets: two bound the elements of one collective, which here is a segment; one says whether units are fetched ahead."""
    found: list[int] = []
    for key in ("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"):
        numel = read(key)
        if numel is not None and numel < _LEAST_BUCKET_NUMEL:
            read.ignore(key, "a collective moves a whole unit; set [units] max_numel to split it")
        elif numel is not None:
            found.append(min(numel, 1 << 40))
    schedule: dict[str, Any] = {}
    ahead = read("zero_optimization.stage3_prefetch_bucket_size")
    if ahead == 0:
        schedule["prefetch"] = 0
    elif ahead is not None:
        read.ignore(
            "zero_optimization.stage3_prefetch_bucket_size", "prefetch counts units, not elements; set [schedule] prefetch"
        )
    if read("zero_optimization.overlap_comm") is False:
        schedule["max_reductions"] = 1
    return ({"units": {"max_numel": min(found)}} if found else {}) | ({"schedule": schedule} if schedule else {})


def _host(read: _Reading) -> dict[str, Any]:
    """Pinning: true is our auto, which pins where there is CUDA; DeepSpeed too takes true where there is none."""
    keys = [
        "zero_optimization.offload_param.pin_memory",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.cpu_offload_use_pin_memory",
    ]
    wanted = [read(key) for key in keys]
    if True in wanted and False in wanted:
        read.ignore(keys[wanted.index(False)], "one pool serves both; what is pinned for one is pinned for the other")
    return {"host": {"pin": False}} if False in wanted and True not in wanted else {}


def _disk(read: _Reading) -> dict[str, Any]:
    disk: dict[str, Any] = {}
    tables = ["zero_optimization.offload_param", "zero_optimization.offload_optimizer"]
    # A path counts before one beside another device, which DeepSpeed does not use.
    tables.sort(key=lambda table: read.get(f"{table}.device") != "nvme")
    for key in (f"{table}.nvme_path" for table in tables):
        path = read(key)
        if path is not None and path != disk.setdefault("path", path):
            read.ignore(key, f"one scratch file serves both; it is in {shown(disk['path'])}")
    written = {key: read(f"aio.{key}") for key in _AIO_DEFAULTS}
    if any(value is not None for value in written.values()):
        aio = {key: _AIO_DEFAULTS[key] if value is None else value for key, value in written.items()}
        disk["block"] = min(-(-max(aio["block_size"], _LEAST_BLOCK_NBYTES) // 4096) * 4096, 1 << 40)
        # As many bytes in flight; requests here are larger where DeepSpeed's are small.
        in_flight = aio["block_size"] * aio["queue_depth"] * max(aio["thread_count"], aio["intra_op_parallelism"])
        disk["threads"] = max(1, min(64, in_flight // disk["block"]))
    return {"disk": disk} if disk else {}
