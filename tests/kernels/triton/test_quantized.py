"""Products with weights in few bits, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.interface import IntegerRows
from kernels.linear_factory import CodeFormat, CodeRows, dequantize_codes
from kernels.reference.linear import dequantize
from kernels.triton import TritonKernels
from kernels.triton.batch_invariant import ROWS, InvariantTritonKernels
from kernels.triton.launch import INTERPRETER, Target
from kernels.triton.quantized import Fp8Linear, Int4Linear, Int8Linear
from kernels.triton.quantized import tile_sizes as tiles
from kernels.triton.quantized.activations import round_groups, round_rows
from kernels.triton.quantized.moe import stackable
from tests.kernels.linears import integer_linear, sliced_floats, sliced_integers

OPS = TritonKernels("cpu", "a test")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDED_INPUTS = {"int8": 0.01, "int4": 0.0, "fp8": 0.06}
"""What rounding activations to eight bits may move a product by, of its size."""


def check(layer, x, weight, bias, allowed):
    """Against the weights that the layer stands for; and those aren't far from what was given."""
    meant = layer.rows(torch.arange(layer.out_features)).double()
    assert float((meant - weight.double()).norm() / weight.double().norm()) < 0.12
    expected = x.double() @ meant.T + (0 if bias is None else bias.double())
    got = layer(x)
    assert got.dtype == x.dtype
    error = (got.double() - expected).norm() / expected.norm()
    rounding = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[x.dtype]
    assert float(error) <= allowed + rounding


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 40, 160), (17, 33, 128), (16, 16, 75)])
def test_products(quantization, dtype, rows, columns, depth):
    x, weight = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth) / depth**0.5
    bias = torch.randn(columns) if rows > 1 else None
    layer = OPS.PackedLinear(weight, bias, quantization=quantization)
    check(layer, x, weight, bias, ROUNDED_INPUTS[quantization])


@pytest.mark.parametrize(("bits", "group", "minima"), [
    (8, 16, False), (8, 48, False), (8, 256, False), (4, 16, False), (4, 32, True),
    (4, 48, True), (4, 96, False),
])  # fmt: skip
def test_integers_as_a_checkpoint_has_them(bits, group, minima):
    low, high = (-127, 128) if bits == 8 else (0, 16)
    values = torch.randint(low, high, (20, 3 * group), dtype=torch.int8)
    scales = torch.rand(20, 3) / high
    min_tensor = torch.rand(20, 3) / 2 if minima else None
    layer = integer_linear(OPS, values, scales, min_tensor, torch.randn(20), bits=bits)
    assert isinstance(layer, Int8Linear if bits == 8 else Int4Linear)
    meant = dequantize(values, scales, min_tensor, bits)
    ids = torch.tensor([19, 0, 7, 7])
    torch.testing.assert_close(layer.rows(ids), meant[ids])
    check(layer, torch.randn(5, 3 * group), meant, layer.bias, 0.012 if bits == 8 else 0.0)


def coded(depth, group, rows=40):
    """e4m3 of all kinds but NaN, with a scale for each `group` of a row; 0: for all of it."""
    codes = torch.randint(0, 256, (rows, depth), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01
    coding = CodeFormat("e4m3", group or 256)
    groups = -(-depth // coding.group_size)
    scales = torch.rand(rows, groups if group else 1).add(0.01) / depth
    return CodeRows(codes, scales.expand(rows, groups).contiguous()), coding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "group"), [(300, 0), (200, 64), (96, 32)])
def test_floats_of_a_checkpoint_stay_as_they_are(dtype, depth, group):
    full, coding = coded(depth, group)
    assert OPS.keeps_code_format(coding)
    chunks = [
        CodeRows(full.codes[:32], full.scales[:32]),
        CodeRows(full.codes[32:], full.scales[32:]),
    ]
    bias = torch.randn(40)
    layer = OPS.make_linear((40, depth), chunks, coding, bias)
    assert isinstance(layer, Fp8Linear)
    assert layer.nbytes == 40 * (depth + 4 * (-(-depth // group) if group else 1))
    meant = dequantize_codes(full, coding)
    ids = torch.tensor([39, 0, 7, 7])
    assert torch.equal(layer.rows(ids), meant[ids])
    for rows in (1, 19):
        check(layer, torch.randn(rows, depth).to(dtype), meant, bias, ROUNDED_INPUTS["fp8"])


def test_a_weight_that_is_no_number_breaks_its_column_alone():
    full, coding = coded(96, 32)
    full.codes[7, 40] = 0xFF
    layer = OPS.make_linear((40, 96), [full], coding)
    got = layer(torch.randn(3, 96))
    assert got[:, 7].isnan().all()
    assert got[:, :7].isfinite().all()
    assert got[:, 8:].isfinite().all()


@pytest.mark.parametrize(
    "coding", [CodeFormat("e2m1", 32), CodeFormat("e4m3", 48), CodeFormat("e4m3", 16)]
)
def test_codes_that_fit_no_block_of_a_product_are_read(coding):
    assert not OPS.keeps_code_format(coding)


@pytest.mark.parametrize("bits", [4, 8])
def test_sorted_inputs_meet_their_columns(bits):
    """As GPTQ's act-order has them; experts of such layers run one by one."""
    order = torch.randperm(128)
    values = torch.randint(0, 16, (24, 128), dtype=torch.int8)
    full_integer_rows = IntegerRows(values, torch.rand(24, 4) / 16)
    form = {"bits": bits, "group_size": 32}
    baseline_tensor = sliced_integers(OPS, (24, 128), [full_integer_rows], **form)
    layer = sliced_integers(OPS, (24, 128), [full_integer_rows], order=order, **form)
    wide = torch.randn(3, 200)
    assert torch.equal(layer(wide[:, :128]), baseline_tensor(wide[:, order]))
    ids = torch.tensor([23, 1, 1])
    assert torch.equal(layer.rows(ids)[:, order], baseline_tensor.rows(ids))
    assert layer.nbytes == baseline_tensor.nbytes + order.nbytes
    assert "order" in layer.tensors()
    assert stackable([baseline_tensor, baseline_tensor])
    assert not stackable([layer, layer])
    with pytest.raises(ValueError, match="order"):
        sliced_integers(OPS, (24, 128), [full_integer_rows], order=order[:5], **form)


def test_layers_of_checkpoints_are_batch_invariant_where_asked():
    ops, (full, coding) = InvariantTritonKernels("cpu", "a test"), coded(96, 32)
    floats = ops.make_linear((40, 96), [full], coding)
    integers = sliced_integers(
        ops,
        (8, 32), [IntegerRows(torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1))], bits=8,
        group_size=32, order=torch.randperm(32),
    )  # fmt: skip
    assert floats.fixed_tile == integers.fixed_tile == ROWS


def test_zero_points_become_minima_of_float16():
    values = torch.randint(0, 16, (20, 96), dtype=torch.int8)
    scales, zeros = (torch.rand(20, 3) / 16).half(), torch.randint(0, 16, (20, 3))
    layer = integer_linear(OPS, values, scales, bits=4, zeros=zeros)
    meant = dequantize(values, scales, None, 4, zeros)
    largest = float(scales.max()) * 15
    torch.testing.assert_close(
        layer.rows(torch.arange(20)), meant, atol=largest * 2**-11, rtol=1e-6
    )


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_pieces_make_the_same_layer(quantization):
    weight, x = torch.randn(96, 64), torch.randn(3, 64)
    full = OPS.PackedLinear(weight, quantization=quantization)
    streamed = sliced_floats(
        OPS, (96, 64), iter(weight.split(32)), dtype=torch.float32, quantization=quantization
    )
    assert torch.equal(streamed(x), full(x))
    with pytest.raises(ValueError, match="rows"):
        sliced_floats(OPS, (97, 64), [weight], dtype=torch.float32, quantization=quantization)


def test_few_bits_take_little_memory():
    weight = torch.randn(64, 256)
    bytes_of = {
        name: OPS.PackedLinear(weight, quantization=name).nbytes / weight.numel()
        for name in OPS.quantizations
    }
    assert bytes_of["int8"] == 1 + 2 / 128
    assert bytes_of["int4"] == 0.5 + 2 / 32
    assert bytes_of["fp8"] == 1 + 4 / 256


@pytest.mark.parametrize(
    ("columns", "splits"), [(128, 8), (4096, 8), (14336, 4), (28672, 2), (128256, 1)]
)
def test_the_depth_of_few_columns_is_split_for_all_processors(columns, splits, monkeypatch):
    monkeypatch.setattr(tiles, "MIN_PAIRS", 8)
    assert tiles.depth_splits(Target(90, 132), columns // 64, 64) == splits
    assert tiles.depth_splits(Target(90, 132), columns // 64, 15) == 1


def test_split_products_leave_their_counters_at_zero():
    """Few columns and a depth of seven pairs, in four parts of which the last has one."""
    weight, x = torch.randn(20, 14 * 32), torch.randn(3, 14 * 32)
    layer = OPS.PackedLinear(weight, quantization="int4")
    assert tiles.depth_splits(INTERPRETER, 2, 7) == 4
    for _ in range(2):
        check(layer, x, weight, None, 0.0)
    assert not tiles.counters(x.device).any()


def test_an_int8_row_is_the_same_in_every_batch():
    layer = OPS.PackedLinear(torch.randn(24, 300), quantization="int8")
    x = torch.randn(19, 300)
    together = layer(x)
    for row in (0, 7, 18):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_strided_rows_an_out_and_none(quantization):
    layer = OPS.PackedLinear(torch.randn(8, 32), quantization=quantization)
    wide = torch.randn(4, 80)
    out = torch.empty(4, 8)
    assert layer(wide[:, :32], out) is out
    assert torch.equal(out, layer(wide[:, :32].contiguous()))
    assert layer(wide[:0, :32]).shape == (0, 8)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_broken_row_stays_broken_and_alone(quantization):
    layer = OPS.PackedLinear(torch.randn(8, 32), quantization=quantization)
    x = torch.randn(3, 32)
    x[1, 5] = float("nan")
    got = layer(x)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()
    x[1] = 0
    assert (layer(x)[1] == 0).all()


def test_rounded_activations():
    x = torch.randn(3, 70) * 5
    full_tensor, scales = round_groups(x, 32)
    back = full_tensor.view(3, 3, 32).float() * scales[..., None]
    assert full_tensor.shape == (3, 96)
    assert (back.flatten(1)[:, :70] - x).abs().max() <= scales.max() / 2 * 1.001
    bits, row_scales = round_rows(x)
    torch.testing.assert_close(row_scales, x.abs().amax(1) / 448)
    expected = (x / row_scales[:, None]).to(torch.float8_e4m3fn).float()
    # A quotient rounded otherwise may fall on the other side of a border.
    off = (bits.view(torch.float8_e4m3fn).float() - expected).abs()
    assert float((off > 0).float().mean()) < 0.02


def test_what_does_not_fit_is_refused():
    layer = OPS.PackedLinear(torch.randn(8, 32), quantization="int8")
    with pytest.raises(ValueError, match="32 columns"):
        layer(torch.randn(2, 31))
    with pytest.raises(ValueError, match="32 columns"):
        layer(torch.randn(2, 32).double())
    with pytest.raises(ValueError, match="out"):
        layer(torch.randn(2, 32), torch.empty(2, 9))
    with pytest.raises(ValueError, match="int8, int4, fp8"):
        OPS.PackedLinear(torch.randn(8, 32), quantization="nf4")
    assert isinstance(OPS.PackedLinear(torch.randn(8, 32), quantization="fp8"), Fp8Linear)
    with pytest.raises(ValueError, match="must lie in"):
        integer_linear(OPS, torch.full((2, 32), 99, dtype=torch.int8), torch.ones(2, 1), bits=4)
    values, ones = torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1)
    with pytest.raises(ValueError, match="no zero points of 8 bits"):
        integer_linear(OPS, values, ones, bits=8, zeros=ones)
