"""ZeRO training for any PyTorch model in one line: ``zhooks.attach(model)``.

Users import from here; everything else is implementation (see docs/architecture.md).  Importing it patches nothing, and
imports no optional library.
"""

import zhooks.shadowed  # noqa: F401  (first: what follows imports offload)
from offload import errors as _errors
from offload.errors import (
    AttachError,
    BudgetError,
    CapabilityError,
    CheckpointError,
    DivergenceError,
    HardwareError,
    LayoutError,
    NonFiniteError,
    PolicyError,
    ScaleError,
    ShardedOpError,
    SimulationError,
    TierError,
    ZhooksError,
)
from offload.events import Recorder
from offload.policy import Policy
from offload.shards import latest
from zhooks import report as report
from zhooks import whole as _whole  # noqa: F401  (a simulated first step would count the calls of an import)
from zhooks.activation import DIVIDERS as _DIVIDERS
from zhooks.attach import Attachment, attach
from zhooks.checkpoint import Saving
from zhooks.comm import OPENERS as _OPENERS
from zhooks.cpu_transport import between_cpus as _between_cpus
from zhooks.integrations import from_pretrained
from zhooks.parallel import open_partition as _open_partition
from zhooks.resilience import Recovery
from zhooks.resilience import ReplicaChecks as _ReplicaChecks
from zhooks.session import CHOOSERS as _CHOOSERS
from zhooks.session import WATCHES as _WATCHES
from zhooks.simulate import Proposals, Simulation, Slowdown, find_policy, simulate
from zhooks.simulate import chosen_for as _chosen_for
from zhooks.simulate import on_paper as _on_paper
from zhooks.tensor import ShardedTensor

__all__ = [
    "AttachError",
    "Attachment",
    "BudgetError",
    "CapabilityError",
    "CheckpointError",
    "DivergenceError",
    "HardwareError",
    "LayoutError",
    "NonFiniteError",
    "Policy",
    "PolicyError",
    "Proposals",
    "Recorder",
    "Recovery",
    "Saving",
    "ScaleError",
    "ShardedOpError",
    "ShardedTensor",
    "Simulation",
    "SimulationError",
    "Slowdown",
    "TierError",
    "ZhooksError",
    "attach",
    "find_policy",
    "from_pretrained",
    "latest",
    "simulate",
]

# The packages that plug into the core, which knows nothing of them.
_OPENERS += [_between_cpus, _on_paper]
_CHOOSERS.append(_chosen_for)
_DIVIDERS["tp"] = _open_partition
_WATCHES.append(_ReplicaChecks)

# Tracebacks, logs and pickles name them as users import them.  Without this package, `offload` has them under its own name.
for _name in _errors.__all__:
    getattr(_errors, _name).__module__ = __name__
