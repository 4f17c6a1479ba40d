"""Whether the stages of a pipeline take all of what they load between them, each parameter on one stage.

``save_load.py`` calls it on every rank once each stage has found its own part.  It compares names and which save wrote the
folders; it reads no values and changes nothing.

Note: [Own folders or common ones]
    Either each stage loads folders of its own and takes all that is in them, or all stages load the same ones and divide what
    is in them.  A stage sees only what it takes itself: what none takes, or two take for theirs, shows in the sum over stages.
"""

from __future__ import annotations

import torch

from offload.errors import CheckpointError
from zhooks.checkpoint.load_shard import Loading
from zhooks.comm import CONTROL, Call, Comm, ControlPlane, text_digest

__all__ = ["check_stages", "one_stage_a_path"]


def one_stage_a_path(comm: Comm, verb: str, path: str) -> None:
    """Stages of a pipeline that save at once must not save to one path: the last would win.  Collective over pp.

    Raises:
        CheckpointError: two do; on the ranks of every stage.
    """
    stages = ControlPlane(comm.pp, verb)
    if len(set(stages.texts(path))) < stages.size:
        each, number = ("pipeline stages", "stage number") if comm.pipelined else ("ep ranks", "ep rank")
        raise CheckpointError(
            f"Cannot {verb} {path}. Expected a separate path for each of the {stages.size} {each}, found two that save to the "
            f"same one. Put the {number} into the path."
        )


def check_stages(comm: Comm, loading: Loading) -> None:
    """See Note [Own folders or common ones].  Collective over pp.

    Raises:
        CheckpointError: neither; on the ranks of every stage.
    """
    axis = comm.pp.axis
    if axis.world == 1:
        return
    rows = _rows(loading)
    each, left = _every_stage(comm, loading, sum(not taken for _, _, taken in rows))
    if sum(map(len, each)) == len(frozenset().union(*each)) and not left:
        return
    problem = "different folders on some stages" + (", with tensors that the loading stage does not have" if left else "")
    if len(set(each)) == 1:
        counts = torch.tensor([taken for _, _, taken in rows], dtype=torch.int64, device="cpu")
        comm.pp.all_reduce(Call(CONTROL, "load: names", "all stages"), counts, "sum")
        found = list(zip(rows, counts.tolist(), strict=True))
        lost = [f"{kind} {name} in no stage" for (kind, name, _), count in found if count == 0]
        twice = [f"parameter {name} in more than one stage" for (kind, name, _), n in found if n > 1 and kind == "parameter"]
        problem = next(iter(twice + lost), "")
    if problem:
        raise CheckpointError(
            f"Cannot load {loading.folders[0].path}. Expected each stage's own folder, or the same folders on all stages with "
            f"each parameter in one stage, under the name it was saved with, found {problem}. Use the same module names in all "
            "stages and in the whole model."
        )


def _every_stage(comm: Comm, loading: Loading, left: int) -> tuple[list[frozenset[int]], int]:
    """Which folders each stage loads, and how much is left over in all.  Collective over pp."""
    axis, call = comm.pp.axis, Call(CONTROL, "load: folders", "all stages")
    mine = [text_digest(folder.manifest.token) for folder in loading.folders]
    most = torch.tensor([len(mine)], dtype=torch.int64, device="cpu")
    comm.pp.all_reduce(call, most, "max")
    tokens = torch.zeros(axis.world, int(most.item()) + 2, dtype=torch.int64, device="cpu")
    tokens[axis.rank] = torch.tensor([left, len(mine), *mine, *[0] * (int(most.item()) - len(mine))], device="cpu")
    comm.pp.all_reduce(call, tokens, "sum")
    rows = tokens.tolist()
    return [frozenset(row[2 : 2 + row[1]]) for row in rows], sum(row[0] for row in rows)


def _rows(loading: Loading) -> list[tuple[str, str, bool]]:
    """What the folders hold that belongs to a stage: its kind, its name, and whether this stage takes it; in one order."""
    saved: dict[str, set[str]] = {"parameter": set(), "buffer": set(), "extra state": set()}
    for folder in loading.folders:
        document = folder.document(folder.counterpart)
        saved["parameter"] |= folder.params.keys()
        saved["buffer"] |= document["buffers"].keys()
        saved["extra state"] |= document["modules"].keys()
    taken = {"parameter": loading.values, "buffer": loading.buffers, "extra state": loading.modules}
    return [(kind, name, name in taken[kind]) for kind, names in saved.items() for name in sorted(names)]
