"""The kernels of the grouped SwiGLU compiled ahead of time for three GPUs."""

import re
from typing import Any

import pytest

from olmo_shard.kernels.grouped_gemm import _grouped_gemm_kernel
from olmo_shard.kernels.grouped_swiglu import _swiglu_bwd_kernel, _swiglu_fwd_kernel
from olmo_shard.kernels.grouped_wgrad import _wgrad_kernel
from tests.support.aot import ARCHS, compile_ahead
from tests.support.ptx import loops_with, waits_for_copies

WIDE = {"num_experts": "i32:16", "tiles_m": "i32", "offsets_ptr": "*i32:16"}
COMMON = {"EXPERTS": 64, "EVEN_K": True, "EVEN_N": True, "GROUP_M": 8}
TILES = {"BLOCK_M": 128, "BLOCK_K": 64, "UPCAST": False, "num_warps": 8, "num_stages": 3}


def bf16(*names: str) -> dict[str, str]:
    return {f"{name}_ptr": "*bf16:16" for name in names}


def compiled(kernel: str, arch: int) -> Any:
    """D = 2048 and F = 1024 or any other multiple of the tiles, 64 experts."""
    pairs = {"row_ptr": "*i64:16", "weight_ptr": "*fp32:16", "F": "i32:16", "D": "i32:16"}
    if kernel == "fwd":
        types = WIDE | pairs | bf16("x", "w", "h", "a")
        columns = 64 if arch < 90 else 128
        return compile_ahead(_swiglu_fwd_kernel, arch, types, BLOCK_N=columns, **COMMON, **TILES)
    if kernel == "bwd":
        types = WIDE | pairs | bf16("dy", "w", "h", "dh", "a")
        types |= {"dweight_ptr": "*fp32:16", "num_pairs": "i32"}
        return compile_ahead(_swiglu_bwd_kernel, arch, types, BLOCK_N=128, **COMMON, **TILES)
    if kernel in ("wgrad, left index", "wgrad, right index"):
        side, other = ("left", "right") if "left" in kernel else ("right", "left")
        types = bf16("left", "right") | {f"{side}_index_ptr": "*i64:16", "dw_ptr": "*fp32:16"}
        types |= {"offsets_ptr": "*i32:16", "M": "i32:16", "N": "i32:16"}
        how: dict[str, Any] = {f"{other}_index_ptr": None, "ADD": True, "EVEN": True}
        how |= {"INDEX_LEFT": side == "left", "INDEX_RIGHT": side == "right"}
        return compile_ahead(_wgrad_kernel, arch, types, **how, GROUP_M=8, BLOCK_N=128, **TILES)
    unit, wide = ("bk", "bn") if kernel == "gemm, transposed" else ("bn", "bk")
    types = WIDE | bf16("a", "b", "c") | {"N": "i32:16", "K": "i32:16", f"stride_{wide}": "i32:16"}
    unit_stride = {f"stride_{unit}": 1}
    return compile_ahead(
        _grouped_gemm_kernel, arch, types, BLOCK_N=128, **unit_stride, **COMMON, **TILES
    )


@pytest.mark.parametrize("kernel", ["fwd", "bwd", "gemm"])
def test_they_compile_for_one_expert(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is 1 becomes a constant, which has no type to convert."""
    monkeypatch.delitem(WIDE, "num_experts")
    monkeypatch.setitem(COMMON, "EXPERTS", 1)
    monkeypatch.setitem(COMMON, "num_experts", 1)
    assert MATMUL[90] in compiled(kernel, 90).ptx


MATMUL = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
REGISTERS = {
    "fwd": 240,
    "bwd": 192,
    "wgrad, left index": 232,
    "wgrad, right index": 232,
    "gemm, transposed": 208,
    "gemm": 208,
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", REGISTERS)
def test_they_compile_ahead_of_time_for_tensor_cores(kernel: str, arch: int) -> None:
    found = compiled(kernel, arch)
    assert MATMUL[arch] in found.ptx
    assert found.spill_bytes == 0
    assert found.registers <= REGISTERS[kernel]
    # Operands by asynchronous copies of 16 bytes, results by stores of 16 bytes.
    assert "cp.async.cg.shared.global" in found.ptx
    copies = re.findall(
        r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (0x)?(\w+)", found.ptx
    )
    assert {int(size, 16 if prefix else 10) for prefix, size in copies} <= {16, 8, 4}
    stores = re.findall(r"st\.global\.(\S+)", found.ptx)
    assert "v4.b32" in stores
    allowed = {"v4.b32", "b32"} if kernel == "bwd" else {"v4.b32"}
    assert set(stores) <= allowed, stores


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", REGISTERS)
def test_copies_for_a_later_step_are_in_flight_during_a_product(kernel: str, arch: int) -> None:
    """The software pipeline of the loop over the inner dimension has all its stages."""
    found = compiled(kernel, arch)
    (loop,) = loops_with(found.ptx, MATMUL[arch])
    # A step's copies are as many groups as the loop commits. Those of one step stay in flight.
    groups = loop.count("cp.async.commit_group")
    waits = waits_for_copies(loop)
    assert groups >= 2  # both operands
    assert waits
    assert min(waits) >= groups, waits
    # A buffer per stage; before sm_90 the products read registers, which are the last stage.
    buffers = TILES["num_stages"] - (1 if arch < 90 else 0)
    columns = {"fwd": 2 * (64 if arch < 90 else 128)}.get(kernel, 128)  # gate and up
    operands = (TILES["BLOCK_M"] + columns) * TILES["BLOCK_K"] * 2
    assert found.shared_bytes >= buffers * operands


def test_waits_are_found_in_the_loop_alone() -> None:
    ptx = """
$L__BB0_1:
 cp.async.wait_group \t2;
 mma.sync a;
 cp.async.wait_all;
 @%p1 bra $L__BB0_1;
 cp.async.wait_group 0;
 @%p2 bra $L__BB0_2;
$L__BB0_2:
"""
    (loop,) = loops_with(ptx, "mma.sync")
    assert waits_for_copies(loop) == [2, 0]
    assert waits_for_copies(ptx) == [2, 0, 0]
    assert loops_with(ptx, "wgmma") == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_index_is_never_read_past_an_experts_last_pair(side: str) -> None:
    """The loop loads the next step's index, also in the last step: every such load has a mask."""
    loads = re.findall(
        r"tt\.load (.*) : tensor<\d+x!tt\.ptr<i64>>", compiled(f"wgrad, {side} index", 90).ttir
    )
    assert len(loads) == 2
    assert all(load.count("%") == 3 for load in loads), loads  # pointers, mask, other


@pytest.mark.parametrize("kernel", REGISTERS)
def test_rows_and_experts_are_found_by_64_bits(kernel: str) -> None:
    """Whatever is added to the start of a tensor, before the offsets inside a tile."""
    ttir = compiled(kernel, 90).ttir
    added = re.findall(r"tt\.addptr %\w+, (%\w+) : !tt\.ptr<(?:bf16|f32)>, (i\d+)", ttir)
    assert {bits for _, bits in added} >= {"i64"}
    narrow = {what for what, bits in added if bits != "i64"}
    assert narrow <= {"%F"}, narrow  # from gate to up, inside a row


def test_offsets_into_the_weight_gradients_are_computed_in_64_bits() -> None:
    """The expert's number is widened before it is multiplied. (For the other kernels a test reads
    beyond 2^31; a program for each of half a million experts would take too long.)
    """
    ttir = compiled("wgrad, right index", 90).ttir
    expert = re.search(r"(%\w+) = tt.get_program_id y", ttir)
    assert expert is not None
    wide = re.search(rf"(%\w+) = arith.extsi {expert[1]} : i32 to i64", ttir)
    assert wide is not None
    assert re.search(rf"arith.muli {wide[1]}, %\w+ : i64", ttir)
    assert not re.search(rf"arith.muli {expert[1]}, ", ttir)
