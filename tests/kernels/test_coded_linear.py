"""Linear layers of codes of floats, and of sorted inputs, against float64 at odd shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.features import choose
from kernels.interface import IntegerRows, KernelSet, LinearLayer
from kernels.linear_factory import CodeFormat, CodeRows, dequantize_codes
from tests.covering import covering
from tests.kernels.linears import sliced_integers
from tests.kernels.tolerance import assert_close

TABLE = tuple(float(x) for x in torch.linspace(-1, 1, 16) ** 3)
ROWS = [0, 1, 2, 3, 7, 33]
SHAPES = [(1, 32), (33, 160), (101, 608)]


def drawn(coding: CodeFormat, n: int, k: int) -> CodeRows:
    """Of each of its values, but for e4m3's NaN."""
    codes = torch.randint(0, 1 << coding.bits, (n, k), dtype=torch.uint8)
    if coding.kind == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0x01
    scales = torch.rand(n, -(-k // coding.group_size)) + 0.01
    # float16 holds those of e2m1.
    return CodeRows(codes, scales.half().float() if coding.kind == "e2m1" else scales)


def packed(
    ops: KernelSet, codes: CodeRows, coding: CodeFormat, bias: Tensor | None = None
) -> LinearLayer:
    n, k = codes.codes.shape
    cut = [
        CodeRows(codes.codes[index : index + 32], codes.scales[index : index + 32])
        for index in range(0, n, 32)
    ]
    return ops.make_linear((n, k), cut, coding, bias)


def multiplies_bf16(ops: KernelSet) -> bool:
    """Whether floats of eight bits become bf16, exactly, and inputs are rounded to it."""
    needed = {"avx512_bf16", "avx512vbmi"}
    return ops.name == "cpu-avx512" and needed.issubset(choose("avx512").features)


def dequantize(ops: KernelSet, codes: CodeRows, coding: CodeFormat) -> Tensor:
    """What floats of eight bits stand for in the kernels: elsewhere they're multiples of 2^-5."""
    if multiplies_bf16(ops):
        return dequantize_codes(codes, coding)
    scales = codes.scales.repeat_interleave(coding.group_size, 1)[:, : codes.codes.shape[1]]
    values = codes.codes.view(torch.float8_e4m3fn).float()
    return (values * 32 + 0.5).floor() / 32 * scales


def inputs(rows: int, k: int, coding: CodeFormat) -> Tensor:
    """What no rounding changes."""
    x = torch.randint(-127, 128, (rows, k)).float()
    x[:, :: coding.group_size] = 127
    return x


@covering(kind=["e4m3", "e2m1", "table"], group=[16, 48, 256], shape=SHAPES)
def test_products(kernels, kind, group, shape):
    n, k = shape
    if kind != "e4m3" and k % group:
        k = -(-k // group) * group
    torch.manual_seed(n * k + group)
    coding = CodeFormat(kind, group, TABLE if kind == "table" else ())
    codes, bias = drawn(coding, n, k), torch.randn(n)
    weight = dequantize_codes(codes, coding)
    layer = packed(kernels, codes, coding, bias)
    for rows in ROWS:
        x = inputs(rows, k, coding)
        exact = x.double() @ weight.double().T + bias.double()
        got = layer(x).double()
        # Of sums of float32 in any order: parts of what is summed. Entries of a table have 16 bits,
        # and floats of eight are off by 2^-6 of their scale at most.
        size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        steps = x.double().abs() @ codes.scales.double().repeat_interleave(group, 1)[:, :k].T
        part = {"table": 1 / 65000, "e4m3": 1 / 64, "e2m1": 0.0}[kind]
        if kind == "e4m3" and multiplies_bf16(kernels):
            part = 0.0
        allowed = 2e-6 * size + steps * part
        assert bool(((got - exact).abs() <= allowed).all())


@pytest.mark.parametrize("kind", ["e4m3", "e2m1", "table"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(compiled, kind, dtype):
    coding = CodeFormat(kind, 64, TABLE if kind == "table" else ())
    codes = drawn(coding, 50, 192)
    codes = CodeRows(codes.codes, codes.scales / 64)
    x = (inputs(5, 192, coding) / 16).to(dtype)
    exact = x.double() @ dequantize_codes(codes, coding).double().T
    # x of a narrow dtype isn't on the grid of 8 bits.
    assert_close(packed(compiled, codes, coding)(x), exact, dtype, slack=64.0)


def test_rows_come_back(kernels):
    ids = torch.tensor([0, 69, 5, 5, 33])
    for kind in ("e4m3", "e2m1", "table"):
        coding = CodeFormat(kind, 16, TABLE if kind == "table" else ())
        codes = drawn(coding, 70, 80)
        got = packed(kernels, codes, coding).rows(ids)
        near = {"table": 1e-4, "e4m3": 2**-6, "e2m1": 0.0}[kind] * float(codes.scales.max())
        if kind == "e4m3" and multiplies_bf16(kernels):
            near = 0.0
        torch.testing.assert_close(got, dequantize_codes(codes, coding)[ids], rtol=0, atol=near)


@pytest.mark.parametrize("kind", ["e4m3", "e2m1", "table"])
def test_rows_are_independent_of_the_batch(compiled, threads, kind):
    coding = CodeFormat(kind, 64, TABLE if kind == "table" else ())
    layer = packed(compiled, drawn(coding, 96, 640), coding)
    x = torch.randn(150, 640)
    full_layer = layer(x)
    for low, high in ((0, 1), (3, 5), (7, 9), (11, 14), (20, 33), (40, 140)):
        assert torch.equal(layer(x[low:high]), full_layer[low:high])


@pytest.mark.parametrize("rows", [1, 20])
def test_every_float_of_eight_bits(compiled, rows):
    """Each alone: those from 0.25 on are exact, smaller ones as `kept` has them, and NaN shows."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    coding, scale = CodeFormat("e4m3", 16), 2.0**-30
    weights = CodeRows(codes, torch.full((256, 1), scale))
    got = packed(compiled, weights, coding)(127 * torch.eye(16)[:1].repeat(rows, 1)) / 127
    torch.testing.assert_close(
        got[0], dequantize(compiled, weights, coding)[:, 0], rtol=1e-6, atol=0, equal_nan=True
    )
    exact = dequantize_codes(weights, coding)[:, 0]
    large = exact.abs() >= 0.25 * scale
    torch.testing.assert_close(got[-1][large], exact[large], rtol=1e-6, atol=0)
    assert float((got[-1] - exact).abs().nan_to_num().max()) <= 2**-6 * scale
    assert int(got.isnan().sum()) == 2 * rows


@pytest.mark.parametrize(("n", "k", "group"), [(1, 16, 16), (33, 157, 48), (70, 1000, 256)])
def test_floats_of_eight_bits_meet_inputs_rounded_to_bf16(compiled, n, k, group):
    """Any inputs, as near as sums of float32 are, and each row as it is alone."""
    if not multiplies_bf16(compiled):
        pytest.skip("inputs are rounded to 8 bits here")
    coding = CodeFormat("e4m3", group)
    codes, x = drawn(coding, n, k), torch.randn(64, k) * torch.logspace(-6, 6, 64)[:, None]
    weight, rounded = dequantize_codes(codes, coding).double(), x.bfloat16().double()
    layer = packed(compiled, codes, coding)
    got = layer(x)
    allowed = 4e-6 * (rounded.abs() @ weight.abs().T)
    assert bool(((got.double() - rounded @ weight.T).abs() <= allowed).all())
    assert torch.equal(layer(x.bfloat16()), got.bfloat16())
    for rows in range(1, 64):
        assert torch.equal(layer(x[:rows]), got[:rows])
        assert torch.equal(layer(x[rows : rows + 1]), got[rows : rows + 1])


@pytest.mark.parametrize("group", [16, 32, 48, 128])
def test_floats_of_four_bits_at_their_limits(compiled, group):
    """All weights and inputs as large as can be: nothing overflows for good."""
    coding = CodeFormat("e2m1", group)
    for code, sign in ((7, 1), (15, 1), (7, -1), (15, -1)):
        codes = CodeRows(torch.full((40, 2 * group), code, dtype=torch.uint8), torch.ones(40, 2))
        for rows in (1, 4, 13):
            x = torch.full((rows, 2 * group), 127.0 * sign)
            expected = x @ dequantize_codes(codes, coding).T
            torch.testing.assert_close(
                packed(compiled, codes, coding)(x), expected, rtol=1e-6, atol=0
            )


def test_inputs_that_are_no_numbers_stay_in_their_row(compiled):
    for kind in ("e4m3", "e2m1", "table"):
        coding = CodeFormat(kind, 32, TABLE if kind == "table" else ())
        x = torch.randn(9, 64)
        x[4, 40] = float("nan")
        bad = packed(compiled, drawn(coding, 40, 64), coding)(x).isnan()
        assert bool(bad[4].all())
        assert not bool(bad[[0, 1, 2, 3, 5, 6, 7, 8]].any())


@pytest.mark.parametrize(
    "form",
    [{"bits": 4}, {"bits": 8}, {"bits": 4, "with_zeros": True}, {"bits": 8, "with_zeros": True}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sorted_inputs(compiled, threads, form: dict[str, Any], dtype):
    """As if the columns stood where they belong; a row stays independent of its batch."""
    torch.manual_seed(4)
    n, k, group = 70, 2400, 48
    low, high = (-128, 128) if form["bits"] == 8 else (0, 16)
    values = torch.randint(low, high, (n, k), dtype=torch.int8)
    zeros = torch.randint(low, high, (n, k // group)) if "with_zeros" in form else None
    full_integer_rows = IntegerRows(values, torch.rand(n, k // group).half(), zeros=zeros)
    order = torch.randperm(k)
    x = torch.randn(40, k).to(dtype)

    def make_layer(order: Tensor | None) -> LinearLayer:
        return sliced_integers(
            compiled, (n, k), [full_integer_rows], group_size=group, order=order, **form
        )

    baseline, layer = make_layer(None), make_layer(order)
    expected = baseline(x[:, order].contiguous())
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x[7:8]), expected[7:8])
    ids = torch.arange(n)
    assert torch.equal(layer.rows(ids)[:, order], baseline.rows(ids))


def test_what_does_not_fit_is_refused(kernels):
    codes = CodeRows(torch.full((4, 32), 16, dtype=torch.uint8), torch.ones(4, 1))
    for invalid in (
        CodeFormat("e4m3", 24), CodeFormat("e4m3", 512), CodeFormat("table", 32),
        CodeFormat("e5m2", 32),
        CodeFormat("e2m1", 32), CodeFormat("e4m3", 16),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"group_size|table|coding|lie in|scales"):
            kernels.make_linear((4, 32), [codes], invalid)


def test_an_order_that_leaves_inputs_out_is_refused(compiled):
    full_integer_rows = IntegerRows(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1))
    for order in (torch.zeros(32, dtype=torch.int64), torch.arange(31), torch.arange(1, 33)):
        with pytest.raises(ValueError, match="order"):
            sliced_integers(
                compiled, (4, 32), [full_integer_rows], bits=8, group_size=32, order=order
            )


def test_sizes_in_memory(compiled):
    sizes = {
        (kind, group): packed(compiled, drawn(coding, 256, 1024), coding).nbytes * 8 / (256 * 1024)
        for kind, group in (("e4m3", 128), ("e2m1", 32), ("table", 64))
        for coding in [CodeFormat(kind, group, TABLE if kind == "table" else ())]
    }
    assert sizes == {("e4m3", 128): 8.25, ("e2m1", 32): 4.5, ("table", 64): 4.5}
