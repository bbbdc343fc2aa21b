"""Packed linear layers against float64, at shapes that fill no panel, tile or group."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.interface import IntegerRows
from kernels.reference.linear import dequantize, quantize
from tests.covering import covering
from tests.kernels.linears import integer_linear, sliced_floats, sliced_integers
from tests.kernels.tolerance import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [0, 1, 2, 7, 15, 33]


def product(x, weight, bias=None):
    """x W^T + b in float64."""
    result = x.double() @ weight.double().T
    return result if bias is None else result + bias.double()


@covering(
    dtype=DTYPES, weight_dtype=DTYPES, shape=[(1, 1), (15, 17), (33, 16), (64, 301), (100, 600)]
)
def test_floating_weights(kernels, dtype, weight_dtype, shape):
    n, k = shape
    torch.manual_seed(n * k)
    weight, bias = torch.randn(n, k).to(weight_dtype), torch.randn(n)
    layer = kernels.PackedLinear(weight, bias)
    for rows in ROWS:
        x = torch.randn(rows, k).to(dtype)
        assert_close(layer(x), product(x, weight, bias), dtype, slack=8.0)


@covering(weight_dtype=DTYPES[1:], shape=[(1, 1), (33, 16), (100, 601)])
def test_weights_of_16_bits_give_the_bits_of_32(kernels, weight_dtype, shape):
    """However many rows: few read the weights as they are, more share widened ones."""
    if not kernels.widens_weights:
        pytest.skip("keeps no 16-bit weights of a float32 model")
    n, k = shape
    torch.manual_seed(n * k)
    weight, bias = torch.randn(n, k).to(weight_dtype), torch.randn(n)
    layer, wide = kernels.PackedLinear(weight, bias), kernels.PackedLinear(weight.float(), bias)
    for rows in (1, 14, 15, 29, 33, 200):
        x = torch.randn(rows, k)
        assert torch.equal(layer(x), wide(x))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_inputs_may_be_rounded_like_bf16_weights(kernels, rows):
    torch.manual_seed(9)
    weight, x = torch.randn(50, 777).bfloat16(), torch.randn(rows, 777)
    got = kernels.PackedLinear(weight, round_inputs=True)(x)
    exact, rounded = product(x, weight), product(x.bfloat16(), weight)
    nearest = min((got - exact).abs().max(), (got - rounded).abs().max())
    assert float(nearest) < 1e-4


def test_more_rows_than_one_round_holds(kernels, threads):
    weight, x = torch.randn(40, 70), torch.randn(2500, 70)
    assert_close(kernels.PackedLinear(weight)(x), product(x, weight), x.dtype, slack=8.0)


@covering(
    indirect=["threads"], threads=[1, 2], quantization=["int8", "int4"],
    group_size=[None, 16, 48, 256],
)  # fmt: skip
def test_integer_weights(kernels, threads, quantization, group_size):
    torch.manual_seed(3)
    weight, bias = torch.randn(70, 301), torch.randn(70)
    layer = kernels.PackedLinear(weight, bias, quantization=quantization, group_size=group_size)
    allowed = {"int8": 0.012, "int4": 0.11}[quantization]
    for rows in ROWS[1:]:
        x = torch.randn(rows, 301)
        expected = product(x, weight, bias)
        assert float((layer(x) - expected).norm() / expected.norm()) < allowed


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounding_of_x_is_all_that_sets_integers_apart(compiled, quantization):
    """What the library rounds weights to is what the reference rounds them to."""
    torch.manual_seed(5)
    weight = torch.randn(40, 256)
    values, scales = quantize(weight, quantization, 32)
    rounded = dequantize(values, scales, None, int(quantization[3:]))
    layer = compiled.PackedLinear(weight, quantization=quantization, group_size=32)
    # Multiples of the largest value over 127 are what x is rounded to: nothing is lost.
    x = torch.randint(-127, 128, (9, 256)).float()
    x[:, ::32] = 127
    assert_close(layer(x), product(x, rounded), torch.float32, slack=8.0)


def test_integers_with_scales_and_minima(kernels, threads):
    torch.manual_seed(6)
    values = torch.randint(0, 16, (50, 96), dtype=torch.int8)
    scales, minima = torch.rand(50, 3).half(), torch.rand(50, 3).half()
    weight = values.double() * scales.double().repeat_interleave(32, 1)
    weight -= minima.double().repeat_interleave(32, 1)
    layer = integer_linear(kernels, values, scales, minima, bits=4)
    x = torch.randint(-127, 128, (9, 96)).float()
    x[:, ::32] = 127
    assert_close(layer(x), product(x, weight), torch.float32, slack=8.0)


RANGES = {4: (0, 16), 8: (-128, 128)}


@pytest.mark.parametrize("bits", RANGES)
def test_integers_with_zero_points(kernels, threads, bits):
    torch.manual_seed(9)
    values = torch.randint(*RANGES[bits], (50, 96), dtype=torch.int8)
    scales, zeros = torch.rand(50, 3).half(), torch.randint(*RANGES[bits], (50, 3))
    weight = values.double() - zeros.double().repeat_interleave(32, 1)
    weight *= scales.double().repeat_interleave(32, 1)
    layer = integer_linear(kernels, values, scales, bits=bits, zeros=zeros)
    x = torch.randint(-127, 128, (9, 96)).float()
    x[:, ::32] = 127
    assert_close(layer(x), product(x, weight), torch.float32, slack=8.0)
    assert torch.equal(layer.rows(torch.arange(50)), weight.float())


@pytest.mark.parametrize("bits", RANGES)
def test_rows_of_integers_with_zero_points_are_independent_of_the_batch(compiled, threads, bits):
    torch.manual_seed(12)
    values = torch.randint(*RANGES[bits], (96, 640), dtype=torch.int8)
    scales, zeros = torch.rand(96, 5).half(), torch.randint(*RANGES[bits], (96, 5))
    layer = integer_linear(compiled, values, scales, bits=bits, zeros=zeros)
    x = torch.randn(150, 640)
    full_layer = layer(x)
    for low, high in ((0, 1), (7, 9), (20, 33), (40, 140)):
        assert torch.equal(layer(x[low:high]), full_layer[low:high])


@pytest.mark.parametrize("bits", [4, 8])
def test_integers_with_scales(kernels, bits):
    torch.manual_seed(7)
    low, high = (-128, 128) if bits == 8 else (0, 16)
    values = torch.randint(low, high, (33, 64), dtype=torch.int8)
    scales, bias = torch.rand(33, 4), torch.randn(33)
    weight = dequantize(values, scales, None, bits)
    layer = integer_linear(kernels, values, scales, bias=bias, bits=bits)
    x = torch.randint(-127, 128, (4, 64)).float()
    x[:, ::16] = 127
    assert_close(layer(x), product(x, weight, bias), torch.float32, slack=8.0)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_independent_of_the_batch(compiled, threads, quantization, dtype):
    torch.manual_seed(8)
    weight, x = torch.randn(96, 700).to(dtype), torch.randn(150, 700).to(dtype)
    layer = compiled.PackedLinear(weight, quantization=quantization)
    full_layer = layer(x)
    for low, high in ((0, 1), (7, 9), (20, 33), (40, 140)):
        assert torch.equal(layer(x[low:high]), full_layer[low:high])


def test_strided_rows_and_given_out(kernels):
    weight, x = torch.randn(24, 32), torch.randn(5, 100)[:, 10:42]
    out = torch.empty(5, 24)
    assert kernels.PackedLinear(weight)(x, out=out).data_ptr() == out.data_ptr()
    assert_close(out, product(x, weight), torch.float32, slack=8.0)


def test_a_view_of_a_weight_is_packed(kernels):
    weight, x = torch.randn(48, 64), torch.randn(3, 32)
    for part in (weight[8:40, :32], weight.T[:32, 8:40]):
        assert_close(kernels.PackedLinear(part)(x), product(x, part), torch.float32, slack=8.0)


@pytest.mark.parametrize("k", [1, 33, 64, 301])
def test_rows_come_back(kernels, k):
    torch.manual_seed(10)
    ids = torch.tensor([0, 69, 5, 5, 33])
    for dtype in DTYPES:
        weight = torch.randn(70, k).to(dtype)
        assert torch.equal(kernels.PackedLinear(weight).rows(ids), weight[ids].float())
    for quantization in ("int8", "int4"):
        weight = torch.randn(70, k)
        values, scales = quantize(weight, quantization, 32)
        rounded = dequantize(values, scales, None, int(quantization[3:]))[:, :k]
        layer = kernels.PackedLinear(weight, quantization=quantization, group_size=32)
        torch.testing.assert_close(layer.rows(ids), rounded[ids])
    assert layer.rows(ids[:0]).shape == (0, k)


def test_rows_with_minima_come_back(kernels):
    values = torch.randint(0, 16, (40, 64), dtype=torch.int8)
    scales, minima = torch.rand(40, 2).half(), torch.rand(40, 2).half()
    layer = integer_linear(kernels, values, scales, minima, bits=4)
    expected = dequantize(values, scales, minima, 4)
    torch.testing.assert_close(layer.rows(torch.arange(40)), expected)


def test_rows_that_are_not_there_are_refused(kernels):
    layer = kernels.PackedLinear(torch.randn(10, 8))
    for invalid in (-1, 10):
        with pytest.raises(ValueError, match="row doesn't exist"):
            layer.rows(torch.tensor([0, invalid]))


def cut(weight, *sizes):
    """Pieces of those many rows, and the rest."""
    return [*weight.split([*sizes, len(weight) - sum(sizes)])]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_weight_in_pieces_equals_the_whole(kernels, quantization):
    torch.manual_seed(11)
    weight, bias, x = torch.randn(141, 70).bfloat16(), torch.randn(141), torch.randn(3, 70)
    streamed = sliced_floats(
        kernels,
        (141, 70),
        iter(cut(weight, 32, 96)),
        bias,
        dtype=torch.bfloat16,
        quantization=quantization,
    )
    assert torch.equal(
        streamed(x), kernels.PackedLinear(weight, bias, quantization=quantization)(x)
    )


def test_pieces_take_the_dtype_of_the_layer(kernels):
    weight, x = torch.randn(70, 33), torch.randn(2, 33)
    streamed = sliced_floats(kernels, (70, 33), cut(weight, 64), dtype=torch.bfloat16)
    assert torch.equal(streamed(x), kernels.PackedLinear(weight.bfloat16())(x))


@pytest.mark.parametrize("with_minima", [False, True])
def test_integers_in_pieces_equal_the_whole(kernels, with_minima):
    torch.manual_seed(12)
    values = torch.randint(0, 16, (75, 64), dtype=torch.int8)
    scales, minima = torch.rand(75, 2).half(), torch.rand(75, 2).half() if with_minima else None
    chunks = [
        IntegerRows(values[rows], scales[rows], None if minima is None else minima[rows])
        for rows in (slice(0, 32), slice(32, 64), slice(64, 75))
    ]
    streamed = sliced_integers(
        kernels, (75, 64), chunks, bits=4, group_size=32, with_minima=with_minima
    )
    x = torch.randn(2, 64)
    assert torch.equal(streamed(x), integer_linear(kernels, values, scales, minima, bits=4)(x))


def test_pieces_that_do_not_make_up_the_weight_are_refused(kernels):
    weight = torch.randn(96, 16)
    for chunks in ([weight[:64]], [weight, weight], [weight[:, :8]], [weight[0]], []):
        with pytest.raises(ValueError, match="piece"):
            sliced_floats(kernels, (96, 16), chunks, dtype=torch.float32)
    values, scales = torch.zeros(96, 32, dtype=torch.int8), torch.ones(96, 1)
    for chunk in (IntegerRows(values, scales, scales), IntegerRows(values, scales[:5])):
        with pytest.raises(ValueError, match=r"minima|scales"):
            sliced_integers(kernels, (96, 32), [chunk], bits=8, group_size=32)


def test_pieces_that_end_within_a_panel_are_refused(compiled):
    weight = torch.randn(70, 16)
    with pytest.raises(ValueError, match="whole panels"):
        sliced_floats(compiled, (70, 16), cut(weight, 5), dtype=torch.float32)


def test_zero_weights_stay_zero(compiled):
    for quantization in (None, "int8", "int4"):
        layer = compiled.PackedLinear(torch.zeros(20, 64), quantization=quantization)
        assert not layer(torch.randn(3, 64)).any()


def test_sizes_in_memory(compiled):
    weight = torch.randn(256, 1024)
    bits = {
        name: compiled.PackedLinear(weight, quantization=name).nbytes * 8 / weight.numel()
        for name in ("int8", "int4")
    }
    assert bits == {"int8": 8.125, "int4": 4.5}
    assert compiled.PackedLinear(weight.bfloat16()).nbytes == weight.numel() * 2


def test_memory_is_given_back(compiled):
    layer = compiled.PackedLinear(torch.randn(64, 64))
    layer(torch.randn(1, 64))
    del layer
    gc.collect()


def test_calls_from_two_threads_at_once(compiled, threads):
    layers = [compiled.PackedLinear(torch.randn(300, 200)) for _ in range(2)]
    inputs = [torch.randn(3, 200), torch.randn(40, 200)]
    expected = [layer(x) for layer, x in zip(layers, inputs)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50):
            calls = [pool.submit(layer, x) for layer, x in zip(layers, inputs)]
            assert all(torch.equal(call.result(), y) for call, y in zip(calls, expected))


def test_what_does_not_fit_is_refused(kernels):
    weight = torch.randn(16, 32)
    with pytest.raises(ValueError, match="quantization"):
        kernels.PackedLinear(weight, quantization="int3")
    for group_size in (0, 8, 40, 512):
        with pytest.raises(ValueError, match="group_size"):
            kernels.PackedLinear(weight, quantization="int8", group_size=group_size)
    values = torch.full((4, 32), 16, dtype=torch.int8)
    with pytest.raises(ValueError, match="lie in"):
        integer_linear(kernels, values, torch.ones(4, 1), bits=4)
    with pytest.raises(ValueError, match="bits"):
        integer_linear(kernels, values, torch.ones(4, 1), bits=5)
    with pytest.raises(ValueError, match="minima are for 4 bits"):
        integer_linear(kernels, values, torch.ones(4, 1), torch.ones(4, 1), bits=8)
    with pytest.raises(ValueError, match="don't fit"):
        integer_linear(kernels, values, torch.ones(3, 1), bits=8)


def test_what_does_not_fit_a_packed_layer_is_refused(compiled):
    layer = compiled.PackedLinear(torch.randn(16, 32))
    with pytest.raises(ValueError, match="dense rows of 32"):
        layer(torch.randn(2, 31))
    with pytest.raises(ValueError, match="out"):
        layer(torch.randn(2, 32), out=torch.empty(2, 15))
    with pytest.raises(ValueError, match="contiguous"):
        layer(torch.randn(2, 32), out=torch.empty(16, 2).T)
    with pytest.raises(ValueError, match="bias"):
        compiled.PackedLinear(torch.randn(16, 32), torch.randn(15))


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_weights_side_by_side_go_back_one_by_one(compiled):
    """8 MiB each: what is left stays as it was, and the last one takes the rest with it."""
    torch.manual_seed(5)
    weights = [torch.randn(2048, 1024) for _ in range(6)]
    x = torch.randn(3, 1024)
    initial_resident_bytes = resident_bytes()
    layers = [compiled.PackedLinear(weight) for weight in weights]
    loaded = resident_bytes() - initial_resident_bytes
    retained_layer = layers[3]
    layers.clear()
    gc.collect()
    remaining_resident_bytes = resident_bytes() - initial_resident_bytes
    assert loaded > 40 * 2**20
    assert remaining_resident_bytes < loaded - 24 * 2**20
    assert_close(retained_layer(x), product(x, weights[3]), x.dtype, slack=8.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_a_dtype_that_no_kernel_takes_is_refused(compiled, dtype):
    with pytest.raises(ValueError, match="must be float32, bfloat16 or float16"):
        compiled.PackedLinear(torch.randn(8, 16))(torch.ones(2, 16, dtype=dtype))
