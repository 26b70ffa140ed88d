"""The names ``triton`` and ``tl`` that all kernel files import.

They are Triton where it is installed. Elsewhere (Triton has wheels for Linux only) they are a
stand-in, so that the plain-torch references in the kernel files can still be imported.

[Note: specialisation] Triton compiles one variant of a kernel for integer arguments that equal 1,
one for multiples of 16, and one for other values. Sizes that depend on routing are exempt
(``do_not_specialize``): they change from step to step, and a rank that compiles in the middle of
training keeps all its peers waiting.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

INSTALLED = importlib.util.find_spec("triton") is not None


class _Absent:
    """Stand-in for ``@triton.jit`` and for the types in a kernel's signature."""

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
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return INSTALLED and triton.knobs.runtime.interpret
