"""What the launcher of a kernel does: which kernels it launches, which operations of torch it
calls, and whether the kernels write outside of what it allocates. For the interpreter.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

POISON = 1234567
_GUARD = 4096
_empty = torch.empty
_FREE_OF_SYNC = {"empty", "fill_", "slice", "view", "detach", "clone"}
"""Operations that allocate, copy or describe, and tell the host no value."""


@dataclass
class Watch:
    launches: list[str] = field(default_factory=list)
    operations: set[str] = field(default_factory=set)

    def check(self, launches: int) -> None:
        """So many launches, and no operation that could wait for the device."""
        assert len(self.launches) == launches, self.launches
        assert self.operations <= _FREE_OF_SYNC, self.operations - _FREE_OF_SYNC


class _Operations(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._found = watch.operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._found.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


class _Kernel:
    """In place of a kernel: the same, and says that it was launched."""

    def __init__(self, name: str, kernel: Any, watch: Watch) -> None:
        self._name, self._kernel, self._watch = name, kernel, watch

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        self._watch.launches.append(self._name)
        launch = self._kernel[grid]

        def launched(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return launch(*args, **kwargs)

        return launched


@contextmanager
def watched(module: ModuleType, **constants: int) -> Iterator[Watch]:
    """Watch the launchers of a kernel file.

    :param constants: values in place of the file's own, for paths that are long otherwise.
    """
    watch, buffers = Watch(), []

    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: Any = None) -> Tensor:
        numel = int(torch.Size(shape).numel())
        buffer = _empty((numel + 2 * _GUARD,), dtype=dtype, device=device)
        buffers.append((buffer.fill_(POISON), numel))
        return buffer[_GUARD : _GUARD + numel].view(shape)

    kernels = {name: kernel for name, kernel in vars(module).items() if name.endswith("_kernel")}
    changed: dict[str, Any] = dict(constants)
    changed |= {name: _Kernel(name, kernel, watch) for name, kernel in kernels.items()}
    # An operator hides what it does from the mode below: its function is called instead.
    operators = {name: each for name, each in vars(module).items() if isinstance(each, CustomOpDef)}
    changed |= {name: operator._init_fn for name, operator in operators.items()}
    with (
        mock.patch.multiple(module, **changed),
        mock.patch("torch.empty", poisoned),
        _Operations(watch),
    ):
        yield watch
    for buffer, numel in buffers:
        outside = torch.cat([buffer[:_GUARD], buffer[_GUARD + numel :]])
        assert (outside == POISON).all(), "written outside of what was allocated"


def products_and_offsets(ttir: str, table: int | None = None) -> set[str]:
    """Types of all products and of all offsets to pointers; those into a table of ``table``
    elements, whose offsets stay small, are left out.
    """
    types = re.findall(r"arith\.muli .* : (\S+)", ttir)
    types += re.findall(r"tt\.addptr .*, (\S+)", ttir)
    return {each.rstrip(">").split("x")[-1] for each in types if each != f"tensor<{table}xi32>"}
