"""Compile kernels ahead of time, for GPUs that this machine does not have."""

from functools import cache
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.support.ptx import ptxas_report

ARCHS = [80, 90, 100]


class Compiled(NamedTuple):
    """A compiled kernel: Triton IR, PTX, and resources."""

    ttir: str
    ptx: str
    registers: int
    """Registers per thread."""
    spill_bytes: int
    shared_bytes: int
    """Shared memory per program."""


def compile_ahead(
    kernel: Any,
    arch: int,
    types: dict[str, str],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    extern_libs: tuple[tuple[str, str], ...] = (),
    **constexprs: Any,
) -> Compiled:
    """Compile for sm_``arch``, once per session.

    :param types: type of each argument that is no constexpr: ``*bf16``, ``i32``, ... The suffix
        ``:16`` marks a pointer or number that is a multiple of 16 in every launch.
    :param extern_libs: names and paths of bitcode libraries.
    """
    return _compile(
        kernel,
        arch,
        tuple(types.items()),
        tuple(constexprs.items()),
        num_warps,
        num_stages,
        extern_libs,
    )


@cache
def _compile(
    kernel: Any,
    arch: int,
    types: tuple[tuple[str, str], ...],
    constexprs: tuple[tuple[str, Any], ...],
    num_warps: int,
    num_stages: int,
    extern_libs: tuple[tuple[str, str], ...],
) -> Compiled:
    given = dict(types) | dict.fromkeys(dict(constexprs), "constexpr")
    names = kernel.arg_names
    assert set(given) == set(names), set(given) ^ set(names)
    source = ASTSource(
        fn=kernel,
        signature={name: given[name].removesuffix(":16") for name in names},
        constexprs=dict(constexprs),
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, type_ in types
            if type_.endswith(":16")
        },
    )
    options: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages}
    if extern_libs:
        options["extern_libs"] = dict(extern_libs)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    report = ptxas_report(compiled.asm["ptx"], arch)
    return Compiled(
        compiled.asm["ttir"],
        compiled.asm["ptx"],
        report.registers,
        report.spill_bytes,
        compiled.metadata.shared,
    )
