"""What of a model an attachment leaves as it is: what ``[units] ignore`` names, and frozen parameters of tensor subclasses.

``plan/request.py`` finds it once, before anything is changed; whoever walks over the model afterwards asks here what is
attached.  It never changes a module and knows no values.

Note: [Ignored]
    What is ignored stays plain: it is neither sharded, gathered, cast, made equal over the ranks nor reduced, in all places
    where it appears, and modules below an ignored one are ignored with it.  What it may be is therefore open: a sparse
    embedding, a module under DistributedDataParallel, one that is attached by itself over other ranks.  Where the
    attachment writes or reads values as a whole it counts: checkpoints hold it, and memory and budgets count it.

Note: [Frozen tensor subclasses]
    A quantised weight cannot lie in a flat buffer, and need not: it is never updated.  It stays whole on every rank; ranks are
    compared as they attach, and a checkpoint has its checksum in place of its values.  One that ``[units] ignore`` names is
    every rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from offload.errors import AttachError
from zhooks import tree
from zhooks.layout.frozen_subclass import FrozenSubclass, is_subclass

__all__ = ["Ignored"]


@dataclass(frozen=True, slots=True, eq=False)
class Ignored:
    """What is left alone.

    Attributes:
        modules: each with everything below it.
        params: in order of registration, by the first of their names.
        frozen: those of them that are frozen and of a tensor subclass.
        unnamed: the names of those of ``frozen`` that no glob names.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: Mapping[str, nn.Parameter] = field(default_factory=dict)
    frozen: Mapping[str, FrozenSubclass] = field(default_factory=dict)
    unnamed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, globs: Sequence[str], sharded: type[Tensor]) -> Ignored:
        """What these globs over names of modules and parameters mean; any of a shared one's names will do.

        Args:
            sharded: the class of parameters that an attachment has.
        Raises:
            AttachError: one matches nothing.
        """
        matched: set[str] = set()

        def named(name: str) -> bool:
            found = [glob for glob in globs if name and fnmatchcase(name, glob)]
            matched.update(found)
            return bool(found)

        roots = [module for name, module in tree.named_modules(model, remove_duplicate=False) if named(name)]
        modules = frozenset(inner for module in roots for inner in tree.modules(module))
        single = [param for name, param in tree.named_parameters(model, remove_duplicate=False) if named(name)]
        left = {id(param) for param in single} | {id(param) for module in modules for param in module._parameters.values()}
        if len(matched) < len(globs):
            missing = ", ".join(sorted(set(globs) - matched))
            raise AttachError(
                f"[units] ignore needs {missing} to match a module or a parameter, found none. Names are those of "
                "model.named_modules() and model.named_parameters(); * matches dots too."
            )
        frozen = {
            f"{prefix}.{key}".lstrip("."): FrozenSubclass(param, module, key)
            for prefix, module in tree.named_modules(model)
            for key, param in module._parameters.items()
            if param is not None and not isinstance(param, sharded) and is_subclass(param)
        }
        named_params = list(tree.named_parameters(model))
        # Each once, by the first of its names.
        frozen = {name: frozen[name] for name, _ in named_params if name in frozen}
        ids = left | {id(one.param) for one in frozen.values()}
        params = {name: param for name, param in named_params if id(param) in ids}
        return cls(modules, params, frozen, frozenset(name for name in frozen if id(params[name]) not in left))

    @property
    def named(self) -> Mapping[str, nn.Parameter]:
        """The parameters that ``[units] ignore`` names."""
        return {name: param for name, param in self.params.items() if name not in self.unnamed}

    def nbytes(self, name: str) -> int:
        """Memory of one of the parameters on this rank; of one made of other tensors, theirs."""
        one = self.frozen.get(name)
        return self.params[name].nbytes if one is None else one.nbytes()

    def __bool__(self) -> bool:
        return bool(self.modules or self.params)

    def identities(self) -> frozenset[int]:
        """Of the parameters."""
        return frozenset(map(id, self.params.values()))

    # What is attached of a model.

    def named_modules(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules that are attached."""
        return tree.named_modules(model, but=self.modules)

    def named_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are attached, each once."""
        left = self.identities()
        return ((name, param) for name, param in tree.named_parameters(model) if id(param) not in left)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that are attached, in order."""
        return [param for _, param in self.named_parameters(model)]

    def named_buffers(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The buffers of modules that are attached, each once."""
        left = self.buffers()
        return ((name, buffer) for name, buffer in tree.named_buffers(model) if id(buffer) not in left)

    def buffers(self) -> frozenset[int]:
        """The identities of ignored modules' buffers."""
        return frozenset(id(buffer) for module in self.modules for buffer in module._buffers.values() if buffer is not None)
