"""What a launch is compiled for, what machine code is made of, and which versions work."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.errors import KernelsUnavailable
from kernels.triton.attention.tile_sizes import TABLE, tile_for
from kernels.triton.launch import Target, check_interpreter, launch, watch
from tools.triton.cases import paged
from tools.triton.sass import programs_a_processor, read

HOPPER = Target(90, 132)
SASS = """
        .headerflags @"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe20000000800 */
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ; /* 0x0000000402047981 */
        /*0020*/              @!P0 LDG.E.U16 R8, desc[UR4][R2.64] ; /* 0x0000000402047981 */
        /*0030*/                   LDGSTS.E.BYPASS.128 [R61], desc[UR10][R12.64], !P3 ;
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R24, gdesc[UR4], R24 ;
        /*0050*/               @P1 BRA 0x30 ;
        /*0060*/                   FADD R1, R1, R1 ;
        /*0070*/              @!P1 BRA 0x60 ;
        /*0080*/               @P2 BRA 0x20 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   NOP;
"""


def test_machine_code_is_counted_in_the_innermost_loop_with_the_products():
    code = read(SASS)
    assert (code.instructions, code.loop, code.matrix, code.wgmma) == (10, 3, 1, True)
    assert (code.loads, code.wide_loads) == (3, 2)


ATTENTION = """
        /*0000*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0030*/                   MUFU.EX2 R7, R7 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   MUFU.EX2 R8, R8 ;
        /*0060*/              @!P0 MUFU.EX2 R9, R9 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R88, R120, gdesc[UR8], R88, gsb0 ;
        /*0080*/                   MUFU.EX2 R10, R10 ;
        /*0090*/               @P1 BRA {back} ;
        /*00a0*/                   EXIT ;
"""


def test_powers_of_two_beside_products_are_counted_round_the_loop():
    """Those between a product and the wait for it, which may come in the next turn."""
    code = read(ATTENTION.format(back="0x10"))
    assert (code.loop, code.matrix, code.powers, code.overlapped) == (9, 3, 4, 2)
    code = read(ATTENTION.format(back="0x50"))
    assert (code.powers, code.overlapped) == (3, 3)


def test_programs_share_registers_shared_memory_and_warps():
    assert programs_a_processor(90, 168, 72_192, 4) == 3
    assert programs_a_processor(90, 255, 1024, 8) == 1
    assert programs_a_processor(90, 32, 0, 16) == 4
    assert programs_a_processor(90, 16, 0, 1) == 32


@pytest.mark.parametrize("group", [17, 32, 48, 71, 128, 256])
def test_large_groups_of_heads_get_warps_for_their_rows(group):
    """With four warps 128 rows spilled more than a KB a thread."""
    tile = tile_for(HOPPER, "decode", 128, group, 2)
    assert tile.rows >= group
    assert tile.rows // tile.warps <= 16
    assert tile.registers is None
    assert tile_for(HOPPER, "decode", 128, 16, 2) == TABLE[9, "decode"][128]


@pytest.mark.parametrize("heads", [(32, 8), (12, 2), (8, 8)])
def test_parts_of_short_prompts_stay_small(heads):
    """In float32, one a split: of a prompt of 1,300 tokens they were half a GB a layer."""
    parts = []

    def record_launch(kernel, grid, args, options):
        if kernel.__name__ == "split_attention_kernel":
            parts.append((args[0].nbytes, args[-2], math.prod(grid)))

    for tokens in range(9, 2100, 40):
        with watch(record_launch, HOPPER):
            paged(1, tokens, heads=heads)
    assert len(parts) > 3
    assert max(size for size, _, _ in parts) <= 72 << 20
    # And few tokens over many keys still keep all processors busy.
    assert parts[0][1] >= 16
    assert min(programs for _, _, programs in parts) >= 0.9 * HOPPER.processors


def test_an_interpreter_that_fails_with_this_numpy_is_refused():
    for triton_version, numpy_version in (("3.6.0", "2.3.5"), ("3.7.1", "2.4.6"), ("3.10", "2.5")):
        check_interpreter(triton_version, numpy_version)
    with pytest.raises(KernelsUnavailable, match=r"numpy 2\.4\.0"):
        check_interpreter("3.6.0", "2.4.0")


@pytest.mark.parametrize(
    ("bits", "dtype", "unit"), [(0x4300, torch.bfloat16, 128.0), (0x6400, torch.float16, 1024.0)]
)
def test_halves_of_a_byte_become_floats_exactly_by_their_bits(bits, dtype, unit):
    """What `nibbles` does; the interpreter computes bfloat16 in float32 instead."""
    halves = torch.arange(16, dtype=torch.int16)
    values = (halves | bits).view(dtype) - (unit + 8.0)
    assert values.dtype == dtype
    assert values.tolist() == [n - 8.0 for n in range(16)]


@pytest.mark.parametrize(("gfx", "num_warps"), [("gfx90a", 4), ("gfx942", 4), ("gfx1100", 8)])
def test_amds_waves_of_32_threads_are_twice_as_many(gfx: str, num_warps: int) -> None:
    launches = []
    with watch(lambda *call: launches.append(call[3]), Target(0, 96, 65_536, gfx)):
        launch(None, (1,), num_warps=4, maxnreg=128, PRECISION="tf32")
    assert launches == [{"num_warps": num_warps, "PRECISION": "ieee"}]
