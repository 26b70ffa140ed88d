"""Triton where it is installed (Linux has it); elsewhere a stand-in, so that the references beside
the kernels can be imported. Kernel files take ``tl`` and ``triton`` from here.

[Note: specialisation] Triton compiles a kernel again for a number that is 1, or a multiple of 16,
where others were not. Numbers that routing decides are exempt (``do_not_specialize``): a rank that
compiles in the middle of training keeps all its peers waiting.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

INSTALLED = importlib.util.find_spec("triton") is not None


class _Absent:
    """Takes the place of ``@triton.jit`` and of the types in a kernel's signature."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, function: Any = None, **_: Any) -> Any:
        return self if function is None else function


if TYPE_CHECKING or INSTALLED:
    import triton
    import triton.language as tl
else:
    triton = tl = _Absent()


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU."""
    return INSTALLED and triton.knobs.runtime.interpret
