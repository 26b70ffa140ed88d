"""Record what a kernel's launcher does in the interpreter.

The record has the launched kernels and the called operations of torch. A kernel that writes outside
of the tensors that the launcher has allocated is an error.
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
"""Elements before and after each allocated tensor, to detect writes outside."""
_empty = torch.empty
_FREE_OF_SYNC = {"empty", "fill_", "slice", "view", "detach", "clone"}
"""Operations that return no value of the device to the host."""


@dataclass
class Watch:
    """Names of launched kernels, in order, and of called operations."""

    launches: list[str] = field(default_factory=list)
    operations: set[str] = field(default_factory=set)

    def check(self, launches: int) -> None:
        """Assert the number of launches, and that no operation waits for the device."""
        assert len(self.launches) == launches, self.launches
        assert self.operations <= _FREE_OF_SYNC, self.operations - _FREE_OF_SYNC


class _Operations(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._operations = watch.operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._operations.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


class _Kernel:
    """A kernel that records its launches."""

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

    :param constants: new values of constants of the file, to reach a path with small inputs.
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
    # The mode below sees no operation inside an operator: call the operator's function instead.
    operators = {name: op for name, op in vars(module).items() if isinstance(op, CustomOpDef)}
    changed |= {name: operator._init_fn for name, operator in operators.items()}
    with (
        mock.patch.multiple(module, **changed),
        mock.patch("torch.empty", poisoned),
        _Operations(watch),
    ):
        yield watch
    for buffer, numel in buffers:
        outside = torch.cat([buffer[:_GUARD], buffer[_GUARD + numel :]])
        assert (outside == POISON).all(), "a kernel has written outside of its tensors"


def products_and_offsets(ttir: str, table: int | None = None) -> set[str]:
    """Types of all integer products and pointer offsets in Triton IR.

    :param table: leave out offsets into a table of this many elements, which are small.
    """
    types = re.findall(r"arith\.muli .* : (\S+)", ttir)
    types += re.findall(r"tt\.addptr .*, (\S+)", ttir)
    return {name.rstrip(">").split("x")[-1] for name in types if name != f"tensor<{table}xi32>"}
