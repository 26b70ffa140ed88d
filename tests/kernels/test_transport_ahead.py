"""The transport's kernels compiled for GPUs that are not here: widths, scopes, registers, 64 bits.

D = 2048 as in a model of a few billion parameters; eight ranks, eight slots of metadata.
"""

import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton", reason="Triton exists on Linux alone")

from triton.runtime.errors import PTXASError  # noqa: E402

from olmo_shard.dispatch.heap.nvshmem_library import find_bitcode  # noqa: E402
from olmo_shard.kernels import (  # noqa: E402
    copy_received_rows,
    put_packed,
    put_rows,
    reduce_and_put,
    signals,
    sum_pairs,
    sum_rows,
)
from tests.support.aot import ARCHS, Compiled, compile_ahead  # noqa: E402

REGISTERS = 64
"""Of a thread at most, so that 1024 of them fit on a multiprocessor."""


class Case(NamedTuple):
    """A kernel and its arguments by type; ``rows`` is the type of rows."""

    kernel: Any
    types: dict[str, str]
    constants: tuple[str, ...] = ("NUM_SLOTS", "WIDTH", "BLOCK", "BLOCK_W")
    num_warps: int = 4


def typed(**names: str) -> dict[str, str]:
    """Types of arguments by groups of names."""
    types = {
        "rows": "rows", "words": "*i64:16", "ints": "*i32:16", "floats": "*fp32:16",
        "bytes_": "*u8:16", "sizes": "i32:16", "numbers": "i32", "wide": "i64:16",
    }  # fmt: skip
    return {name: types[kind] for kind, group in names.items() for name in group.split()}


CASES = {
    "push": Case(
        put_rows._put_rows_kernel,
        typed(
            rows="x_ptr", words="row_ptr counts_ptr routes_ptr peer_ptrs_ptr epoch_ptr",
            floats="weights_ptr", ints="experts_ptr", numbers="rank num_ranks",
            sizes="max_rows experts_at header_at rows_at", wide="region_bytes",
        ),
    ),
    "reduce": Case(
        reduce_and_put._reduce_and_put_kernel,
        typed(
            rows="y_ptr own_ptr", ints="pair_ptr", words="counts_ptr peer_ptrs_ptr epoch_ptr",
            floats="weights_ptr", numbers="rank num_ranks",
            sizes="max_own max_rows header_at rows_at", wide="region_bytes",
        ),
    ),
    "pull": Case(
        copy_received_rows._copy_received_kernel,
        typed(
            rows="x_ptr rows_ptr", words="row_ptr own_counts_ptr counts_ptr epoch_ptr",
            floats="own_weights_ptr weights_ptr", ints="own_experts_ptr experts_ptr",
            bytes_="arena_ptr", numbers="rank num_ranks num_rows_out",
            sizes="experts_at rows_at", wide="region_bytes",
        ),
    ),
    "sum_rows": Case(
        sum_rows._sum_rows_kernel,
        typed(
            rows="own_ptr out_ptr", words="counts_ptr epoch_ptr totals_ptr", ints="row_ptr",
            bytes_="arena_ptr", numbers="rank num_ranks num_tokens", sizes="rows_at",
            wide="region_bytes",
        ),
        ("WIDTH", "BLOCK"),
    ),
    "sum_pairs": Case(
        sum_pairs._sum_pairs_kernel,
        typed(rows="y_ptr out_ptr", ints="pair_ptr", numbers="num_rows"),
        ("NUM_SLOTS", "WIDTH", "BLOCK"),
    ),
    "signal": Case(
        signals._signal_peers_kernel,
        typed(words="flag_ptrs_ptr epoch_ptr", numbers="rank num_ranks"),
        ("BLOCK_W",),
        num_warps=1,
    ),
    "wait": Case(
        signals._wait_signals_kernel,
        typed(
            words="flags_ptr epoch_ptr own_counts_ptr own_routes_ptr counts_ptr totals_ptr",
            ints="error_ptr", bytes_="arena_ptr", numbers="rank num_ranks",
            sizes="max_rows header_at", wide="limit region_bytes",
        ),
        ("NUM_SLOTS", "BLOCK_W", "HAS_CLOCK"),
        num_warps=1,
    ),
    "put": Case(
        put_packed._put_packed_kernel,
        typed(
            words="remote_ptr counts_ptr flags_ptr epoch_ptr", bytes_="arena_ptr staging_ptr",
            ints="pes_ptr", numbers="rank num_ranks", wide="region_bytes",
            sizes="max_rows header_at rows_at row_bytes",
        ),
        ("WITH_METADATA",),
    ),
}  # fmt: skip
SIZES = {"NUM_SLOTS": 8, "WIDTH": 2048, "BLOCK": 2048, "BLOCK_W": 8}
SWITCHES = {"HAS_CLOCK": True, "WITH_METADATA": True}
ROWS_ALONE: dict[str, Any] = {"weights_ptr": None, "experts_ptr": None}


def ahead(
    name: str, arch: int, rows: str = "bf16", bitcode: Path | None = None, **constants: Any
) -> Compiled:
    """:param constants: in place of arguments, or of the usual sizes."""
    case = CASES[name]
    usual = {each: (SIZES | SWITCHES)[each] for each in case.constants}
    types = {each: type_ for each, type_ in case.types.items() if each not in constants}
    return compile_ahead(
        case.kernel,
        arch,
        {each: f"*{rows}:16" if type_ == "rows" else type_ for each, type_ in types.items()},
        num_warps=case.num_warps,
        extern_libs=(("libnvshmem_device", str(bitcode)),) if bitcode else (),
        **(usual | {k: v for k, v in constants.items() if k in case.types or k in usual}),
    )


def accesses(ptx: str, kind: str) -> Counter[str]:
    """How often each form of an instruction occurs: ``global.v4.b32`` ..."""
    return Counter(re.findall(rf"\b{kind}\.([\w.]+)", ptx))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows", ["bf16", "fp32"])
def test_rows_are_moved_by_16_bytes(arch: int, rows: str) -> None:
    """What is narrower are the header's two words."""
    for name in ("push", "reduce"):
        for changes in ({}, ROWS_ALONE):
            stores = accesses(ahead(name, arch, rows, **changes).ptx, "st")
            assert stores.pop("global.b64") == 2, name
            assert set(stores) == {"global.v4.b32"}, name
    assert set(accesses(ahead("pull", arch, rows).ptx, "st")) == {"global.v4.b32"}
    for name in ("pull", "sum_rows", "sum_pairs"):
        found = ahead(name, arch, rows).ptx
        assert accesses(found, "ld")["global.v4.b32"] >= 2, name
        assert set(accesses(found, "st")) == {"global.v4.b32"}, name


def test_rows_that_are_no_multiple_of_16_bytes_are_moved_by_8() -> None:
    stores = accesses(ahead("push", 90, WIDTH=2052, **ROWS_ALONE).ptx, "st")
    assert set(stores) == {"global.b64", "global.v2.b32"}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_release_for_each_peer_and_an_acquire_at_system_scope(arch: int) -> None:
    """A program of 32 threads holds 8 peers: one instruction is one release each."""
    signal, wait = ahead("signal", arch), ahead("wait", arch)
    assert accesses(signal.ptx, "atom") == {"global.sys.release.exch.b64": 1}
    assert accesses(wait.ptx, "atom") == {"global.sys.acquire.add.u64": 1}
    # The epoch is stored once all have read it; headers are read once all have acquired.
    steps = r"tt\.atomic_rmw|ttg\.\w*barrier|gpu\.barrier|tt\.load|tt\.store|scf\.\w+"
    after = re.findall(steps, signal.ttir.split("tt.atomic_rmw")[1])
    assert [after[0].split(".")[1], after[1]] == ["barrier", "tt.store"]
    after = re.findall(steps, wait.ttir.split("scf.yield")[-1])
    assert "barrier" in after[0]
    assert "tt.load" in after


@pytest.mark.parametrize("arch", ARCHS)
def test_the_threads_of_a_wait_agree_on_the_time(arch: int) -> None:
    """Both readings, two words each, go through all 32 of them; the flags through 8."""
    ptx = ahead("wait", arch).ptx
    assert ptx.count("%globaltimer") == 2
    assert len(re.findall(r"shfl\.sync\.bfly\.b32 .*, 16, 31, -1;", ptx)) == 4


@pytest.mark.parametrize("arch", ARCHS)
def test_mailboxes_are_not_read_by_the_path_that_may_be_stale(arch: int) -> None:
    for name in ("pull", "sum_rows", "wait"):
        loads = accesses(ahead(name, arch).ptx, "ld")
        assert not any(".nc" in form for form in loads), name


@pytest.mark.parametrize("arch", ARCHS)
def test_sums_are_in_fp32_and_rounded_to_nearest(arch: int) -> None:
    for name in ("reduce", "sum_rows", "sum_pairs"):
        found = ahead(name, arch)
        additions = re.findall(r"arith\.addf .* : tensor<\d+x(\w+)>", found.ttir)
        assert set(additions) == {"f32"}, name
        assert set(accesses(found.ptx, "cvt")) & {"rn.bf16x2.f32", "rn.bf16.f32"}, name
        assert "cvt.rz.bf16" not in found.ptx, name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows", ["bf16", "fp32"])
def test_few_registers_and_no_spills(arch: int, rows: str) -> None:
    for name in set(CASES) - {"put"}:
        found = ahead(name, arch, rows)
        assert found.spill_bytes == 0, name
        assert found.registers <= REGISTERS, name


def test_rows_times_width_and_all_other_products_are_in_64_bits() -> None:
    for name in set(CASES) - {"put"}:
        for rows in ("bf16", "fp32"):
            products = re.findall(r"arith\.muli .* : (\S+)", ahead(name, 90, rows).ttir)
            assert products, name
            assert {re.sub(r"tensor<\d+x|>", "", each) for each in products} == {"i64"}, name


def test_numbers_that_are_1_become_constants() -> None:
    """Triton compiles a variant of its own for them."""
    ones: dict[str, Any] = {
        "rank": 1, "max_rows": 1, "max_own": 1, "num_rows_out": 1, "num_tokens": 1, "num_rows": 1,
        "NUM_SLOTS": 1, "WIDTH": 1, "BLOCK": 1, "row_ptr": None, "routes_ptr": None,
    }  # fmt: skip
    for name in set(CASES) - {"put"}:
        case = CASES[name]
        changes = {k: v for k, v in ones.items() if k in case.types or k in case.constants}
        if name == "sum_rows":
            del changes["row_ptr"]
        assert ahead(name, 90, **changes).ptx


@pytest.mark.parametrize("arch", ARCHS)
def test_nvshmem_is_linked_where_it_is_wanted_and_nowhere_else(arch: int) -> None:
    """With the library of the installed wheel, some seconds for each GPU."""
    package = importlib.util.find_spec("nvidia.nvshmem")
    if package is None or not package.submodule_search_locations:
        pytest.skip("nvidia-nvshmem-cu13 is not installed")
    library = Path(next(iter(package.submodule_search_locations))) / "lib"
    bitcode = find_bitcode(library, divmod(arch, 10))
    found = ahead("put", arch, bitcode=bitcode)
    assert "nvshmemi_device_state_d" in found.ptx
    for name in set(CASES) - {"put"}:
        assert "nvshmem" not in ahead(name, arch).ptx, name


def test_without_nvshmems_library_its_kernel_cannot_be_compiled(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PTXASError, match="nvshmemx_putmem_signal_nbi_block"):
        ahead("put", 90)
