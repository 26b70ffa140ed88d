"""Which module reads which parameter: what lets weights arrive while the forward already runs.

[Note: readers] In mode ``ddp`` the weights of a step arrive during the next forward. Before a
module reads a parameter, the parameter must have arrived. A module class therefore declares, in a
method ``parameter_readers``, which parameters its forward reads, and before which module's forward
they must have arrived. As a rule the module itself is the reader; a module may name another one
that always runs before the read, so that hooks stay outside of compiled code and the wait is as
late as possible.

Two rules keep code that declares nothing from computing with old weights:

- A parameter without a declared reader must have arrived before the forward of the whole model.
- A class without a declaration could read any parameter, so a model that contains one waits for all
  parameters before its forward. A declaration is not inherited: a subclass may read more than its
  base class, and declares again. Modules of ``torch.nn`` read their own parameters only and are
  exempt.
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

ParameterReaders = Iterable[tuple[nn.Module, Iterable[Tensor]]]
"""Pairs of a reader and the parameters that must have arrived before the reader's forward."""


@runtime_checkable
class DeclaresReaders(Protocol):
    """A module class that says which parameters its forward reads."""

    def parameter_readers(self) -> ParameterReaders:
        """The readers of all parameters that this module's own code reads; see [Note: readers].

        Parameters that modules inside this one read are theirs to declare.
        """
        ...


def parameter_readers(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules before whose forward each parameter must have arrived, by parameter name.

    A reader inside another reader of the same parameter is left out: the outer one runs before it.
    """
    readers: dict[str, list[nn.Module]] = {name: [] for name, _ in model.named_parameters()}
    # The safe answer comes first: unknown code may read anything.
    if undeclared_classes(model):
        return {name: [model] for name in readers}
    name_of: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    paths = _paths(model)
    # Outer modules come first, so that a reader is compared with the readers around it.
    for module in paths:
        if not isinstance(module, DeclaresReaders):
            continue
        for reader, parameters in module.parameter_readers():
            for parameter in parameters:
                known = readers[name_of[parameter]]
                if not any(_is_inside(paths[reader], paths[outer]) for outer in known):
                    known.append(reader)
    return {name: known or [model] for name, known in readers.items()}


def undeclared_classes(model: nn.Module) -> list[str]:
    """Names of the module classes in a model whose own code declares no parameter readers."""
    classes = {type(module) for module in model.modules()}
    return sorted(
        kind.__qualname__
        for kind in classes
        if "parameter_readers" not in vars(kind) and not kind.__module__.startswith("torch.nn.")
    )


def _paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All paths to each module, outer modules first: "" for the model, "a.b." for the others."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(f"{path}." if path else "")
    return paths


def _is_inside(inner_paths: list[str], outer_paths: list[str]) -> bool:
    """Whether every path to a module leads through another module, or is that module's.

    A module that two parents share is inside neither of them: one parent may call it before the
    other parent runs.
    """
    return all(any(inner.startswith(outer) for outer in outer_paths) for inner in inner_paths)
