"""The compiled decoder does what its operations do one by one, to the bit."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap

import pytest
import torch

from kernels.attention_args import AttentionArgs
from kernels.interface import AuxStateBuffer, NormWeights, StateRows
from tests.kernels.decoder_layers import Layer, Shape, compile_layers

SHAPE = Shape(
    hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=32, intermediate_size=160,
    norm_eps=1e-5, attention_scale=0.2,
)  # fmt: skip
SEQUENCES = [(1, 40), (9, 30), (1, 1), (20, 20)]  # queries, length
BLOCK_SIZE = 8


def vector(size):
    return 1 + 0.1 * torch.randn(size)


def norm(size):
    return NormWeights("rms", vector(size))


def int8_caches():
    """Options of a layer whose caches are int8."""
    shape = (40, SHAPE.num_kv_heads, BLOCK_SIZE)
    values = [torch.randint(-127, 128, (*shape, SHAPE.head_dim)).char() for _ in range(2)]
    scales = [torch.rand(shape) / 127 for _ in range(2)]
    names = ("key_cache", "value_cache", "key_scales", "value_scales")
    return dict(zip(names, [*values, *scales]))


def make_layer(kernels, *, quantization=None, dtype=torch.float32, **options):
    def linear(rows, columns):
        weight = (torch.randn(rows, columns) * columns**-0.5).to(dtype)
        return kernels.PackedLinear(weight, 0.1 * torch.randn(rows), quantization=quantization)

    shape = (40, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
    caches = [kernels.new_kv_cache(shape, torch.bfloat16).normal_() for _ in range(2)]
    angle = torch.rand(64, 8)
    width, q = SHAPE.hidden_size, SHAPE.num_heads * SHAPE.head_dim
    return Layer(
        **{
            "input_norm": norm(width),
            "qkv": linear(q + 2 * SHAPE.num_kv_heads * SHAPE.head_dim, width),
            "cos_sin": torch.cat((angle.cos(), angle.sin()), -1),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "o": linear(width, q),
            "mlp_norm": norm(width),
            "gate_up": linear(2 * SHAPE.intermediate_size, width),
            "down": linear(width, SHAPE.intermediate_size),
            **options,
        }
    )


def make_batch():
    """Arguments after `hidden`, and the number of tokens."""
    counts = [-(-length // BLOCK_SIZE) for _, length in SEQUENCES]
    order = torch.randperm(40).int()
    tables = torch.zeros(len(SEQUENCES), max(counts), dtype=torch.int32)
    positions, slots, num_used = [], [], 0
    for row, ((queries, length), count) in enumerate(zip(SEQUENCES, counts)):
        tables[row, :count] = order[num_used : num_used + count]
        num_used += count
        index = torch.arange(length - queries, length)
        positions.append(index)
        slots.append(tables[row, index // BLOCK_SIZE].long() * BLOCK_SIZE + index % BLOCK_SIZE)
    starts = torch.tensor([0, *(queries for queries, _ in SEQUENCES)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in SEQUENCES]).int()
    return [torch.cat(positions), torch.cat(slots), tables, lengths, starts], int(starts[-1])


def one_by_one(kernels, shape, layers, final_norm, hidden, batch, rows, other_groups=()):
    """What the decoder should do."""
    positions, _, _, lengths, starts = batch
    groups = [batch[1:3], *other_groups]
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    eps, gate = shape.norm_eps, {
        "silu": kernels.silu_and_mul,
        "gelu": kernels.gelu_and_mul,
        "gelu_tanh": lambda x: kernels.gelu_and_mul(x, "tanh"),
    }[shape.activation]  # fmt: skip
    residual = hidden.clone()
    x = kernels.rms_norm(residual, layers[0].input_norm.weight, eps)
    for index, layer in enumerate(layers):
        slots, tables = groups[layer.group]
        q, k, v = layer.qkv(x).split((q_size, kv_size, kv_size), -1)
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in (q, k, v))
        kernels.rope_and_cache(
            q, k, v, positions, layer.cos_sin, layer.key_cache, layer.value_cache, slots,
            layer.q_norm, layer.k_norm, eps, shape.rope_neox, layer.key_scales, layer.value_scales,
        )  # fmt: skip
        x = kernels.paged_attention(
            AttentionArgs(
                q,
                layer.key_cache,
                layer.value_cache,
                tables,
                lengths,
                starts,
                shape.attention_scale,
                layer.window,
                shape.attention_soft_cap,
                sinks=layer.sinks,
                key_scales=layer.key_scales,
                value_scales=layer.value_scales,
            ),
        )
        x = layer.o(x.flatten(1))
        if layer.attention_out_norm.weight is not None:
            x = kernels.rms_norm(x, layer.attention_out_norm.weight, eps)
        last = index == len(layers) - 1
        if last and rows is not None:
            x, residual = x[rows], residual[rows]
        x = kernels.fused_add_rms_norm(x, residual, layer.mlp_norm.weight, eps)
        x = layer.down(gate(layer.gate_up(x)))
        if layer.mlp_out_norm.weight is not None:
            x = kernels.rms_norm(x, layer.mlp_out_norm.weight, eps)
        following = final_norm if last else layers[index + 1].input_norm
        x = kernels.fused_add_rms_norm(x, residual, following.weight, eps)
    return x


def check(kernels, shape, layers, rows=None, num_groups=1):
    batch, tokens = make_batch()
    other_groups = [make_batch()[0][1:3] for _ in range(num_groups - 1)]
    hidden, final_norm = torch.randn(tokens, shape.hidden_size), norm(shape.hidden_size)
    initial = [(layer.key_cache.clone(), layer.value_cache.clone()) for layer in layers]
    expected = one_by_one(kernels, shape, layers, final_norm, hidden, batch, rows, other_groups)
    written = [(layer.key_cache.clone(), layer.value_cache.clone()) for layer in layers]
    for layer, (keys, values) in zip(layers, initial):
        layer.key_cache.copy_(keys)
        layer.value_cache.copy_(values)
    decoder = compile_layers(kernels, shape, layers, final_norm)
    assert torch.equal(decoder(hidden, *batch, rows, other_groups), expected)
    for layer, (keys, values) in zip(layers, written):
        assert torch.equal(layer.key_cache, keys)
        assert torch.equal(layer.value_cache, values)


@pytest.mark.parametrize("rows", [None, torch.tensor([29, 0, 7])])
def test_it_tells_what_some_layers_begin_with(compiled, threads, rows):
    layers = [make_layer(compiled) for _ in range(3)]
    final_norm, (batch, tokens) = norm(SHAPE.hidden_size), make_batch()
    hidden = torch.randn(tokens, SHAPE.hidden_size)
    following_copy = hidden.clone()
    compile_layers(compiled, SHAPE, layers[:2], final_norm)(following_copy, *batch)  # overwrites it
    decoder = compile_layers(compiled, SHAPE, layers, final_norm)
    states = torch.full((tokens, 2 * SHAPE.hidden_size), torch.nan)
    aux_outputs = decoder(hidden.clone(), *batch, rows, inputs=AuxStateBuffer((0, 2), states))
    assert torch.equal(aux_outputs, decoder(hidden.clone(), *batch, rows))
    assert torch.equal(states, torch.cat((hidden, following_copy), dim=-1))


def test_a_stage_without_states_ignores_the_blocks_of_others(compiled):
    """A model has them, its attention layers alone in a stage don't."""
    batch, tokens = make_batch()
    decoder = compile_layers(compiled, SHAPE, [make_layer(compiled)], norm(SHAPE.hidden_size))
    hidden, states = torch.randn(tokens, SHAPE.hidden_size), StateRows(batch[-1], torch.arange(4))
    assert torch.equal(
        decoder(hidden.clone(), *batch, states=states), decoder(hidden.clone(), *batch)
    )


def test_inputs_of_layers_that_are_not_there_are_refused(compiled):
    batch, tokens = make_batch()
    layers = [make_layer(compiled) for _ in range(2)]
    decoder = compile_layers(compiled, SHAPE, layers, norm(SHAPE.hidden_size))
    hidden = torch.randn(tokens, SHAPE.hidden_size)
    initial_copies = [layer.key_cache.clone() for layer in layers]
    for taps in ((0, 2), (1, 0), (1, 1), (-1, 0)):
        states = torch.zeros(tokens, 2 * SHAPE.hidden_size)
        with pytest.raises(ValueError, match="layers"):
            decoder(hidden, *batch, inputs=AuxStateBuffer(taps, states))
    with pytest.raises(ValueError, match="inputs"):
        decoder(hidden, *batch, inputs=AuxStateBuffer((0, 1), states[:-1]))
    assert all(map(torch.equal, [layer.key_cache for layer in layers], initial_copies))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_layers(compiled, threads, quantization, dtype):
    torch.manual_seed(1)
    layers = [make_layer(compiled, quantization=quantization, dtype=dtype) for _ in range(3)]
    check(compiled, SHAPE, layers)


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ({"activation": "gelu"}, {}),
        ({"activation": "gelu_tanh", "attention_soft_cap": 5.0}, {}),
        ({"rope_neox": False}, {"window": 6}),
        ({}, {"q_norm": vector(32), "k_norm": vector(32)}),
        ({}, {"sinks": torch.randn(6), "cos_sin": None}),
        ({}, {"attention_out_norm": norm(96), "mlp_out_norm": norm(96)}),
    ],
)
def test_variations(compiled, threads, shape, layer):
    torch.manual_seed(2)
    layers = [make_layer(compiled, **layer) for _ in range(2)]
    check(compiled, dataclasses.replace(SHAPE, **shape), layers)


def test_some_layers_rotate_and_others_do_not(compiled, threads):
    torch.manual_seed(7)
    layers = [make_layer(compiled, cos_sin=None), make_layer(compiled), make_layer(compiled)]
    layers[2] = dataclasses.replace(layers[2], cos_sin=None)
    check(compiled, SHAPE, layers)


def test_layers_of_several_groups(compiled, threads):
    torch.manual_seed(6)
    layers = [
        make_layer(compiled, group=group, window=window)
        for group, window in ((1, 6), (2, 6), (0, 0), (1, 6))
    ]
    check(compiled, SHAPE, layers, num_groups=3)


def test_int8_caches(compiled, threads):
    torch.manual_seed(5)
    layers = [make_layer(compiled, **int8_caches()) for _ in range(2)]
    check(compiled, SHAPE, layers)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_caches(compiled, threads, dtype):
    torch.manual_seed(6)
    shape = (40, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)

    def caches():
        keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
        scales = [torch.linspace(0.5, 2.0, SHAPE.num_kv_heads) for _ in range(2)]
        return dict(
            zip(("key_cache", "value_cache", "key_scales", "value_scales"), (keys, values, *scales))
        )

    check(compiled, SHAPE, [make_layer(compiled, **caches()) for _ in range(2)])


@pytest.mark.parametrize("rows", [[59, 60], [3, 80, 59], [110]])
def test_wanted_rows_of_prompts_that_take_several_tiles(compiled, threads, monkeypatch, rows):
    monkeypatch.setattr("tests.kernels.test_decoder.SEQUENCES", [(60, 60), (1, 40), (50, 64)])
    torch.manual_seed(4)
    layers = [make_layer(compiled) for _ in range(2)]
    check(compiled, SHAPE, layers, torch.tensor(rows))


@pytest.mark.parametrize("rows", [[], [0], [30, 0, 30, 9], list(range(31))])
def test_only_wanted_rows(compiled, threads, rows):
    torch.manual_seed(3)
    layers = [make_layer(compiled) for _ in range(2)]
    check(compiled, SHAPE, layers, torch.tensor(rows, dtype=torch.int64))


def test_more_tokens_than_an_mlp_takes_at_once(compiled, monkeypatch):
    torch.manual_seed(4)
    monkeypatch.setattr("tests.kernels.test_decoder.SEQUENCES", [(1, 1)] * 3)
    layer = make_layer(compiled)
    tokens = 1100
    slots = torch.full((tokens,), -1)
    starts, tables = torch.tensor([0, *range(1, tokens + 1)]).int(), torch.zeros(tokens, 1).int()
    batch = [torch.zeros(tokens).long(), slots, tables, torch.ones(tokens).int(), starts]
    hidden, final_norm = torch.randn(tokens, 96), norm(96)
    expected = one_by_one(compiled, SHAPE, [layer], final_norm, hidden, batch, None)
    decoder = compile_layers(compiled, SHAPE, [layer], final_norm)
    assert torch.equal(decoder(hidden, *batch), expected)


def test_the_reference_has_none():
    from kernels.reference import ReferenceKernels

    assert compile_layers(ReferenceKernels(), SHAPE, [], norm(96)) is None


def test_nothing_is_written_when_a_batch_is_refused(compiled):
    layer = make_layer(compiled)
    decoder = compile_layers(compiled, SHAPE, [layer], norm(96))
    keys = layer.key_cache.clone()

    def refused(words, **changes):
        batch, tokens = make_batch()
        names = ["positions", "slots", "tables", "lengths", "starts"]
        values = [changes.get(name, value) for name, value in zip(names, batch)]
        with pytest.raises(ValueError, match=words):
            decoder(changes.get("hidden", torch.randn(tokens, 96)), *values, changes.get("rows"))
        assert torch.equal(layer.key_cache, keys)

    (positions, slots, tables, lengths, _), tokens = make_batch()
    refused("position", positions=positions + 60)
    refused("slot", slots=slots + 320)
    refused("block outside", tables=tables + 40)
    refused("contradict", lengths=lengths - 10)
    refused("requested row", rows=torch.tensor([tokens]))
    refused("hidden", hidden=torch.randn(tokens, 95))
    refused("positions", positions=positions.int())

    # What is wrong with another group's table is seen before the first group's is written, too.
    layers = [make_layer(compiled, group=group) for group in (1, 0)]
    decoder, keys = compile_layers(compiled, SHAPE, layers, norm(96)), layers[0].key_cache.clone()
    batch, tokens = make_batch()
    good, invalid = (slots, tables), (slots, tables + 40)
    for indexes_of, other in ((invalid, good), (good, invalid)):
        arguments = [batch[0], *indexes_of, *batch[3:]]
        with pytest.raises(ValueError, match="block outside"):
            decoder(torch.randn(tokens, 96), *arguments, other_groups=[other])
    with pytest.raises(ValueError, match="contradict"):
        decoder(torch.randn(tokens, 96), *batch)
    assert torch.equal(layers[0].key_cache, keys)


def test_layers_that_do_not_fit_are_refused(compiled):
    from kernels.reference import ReferenceKernels

    layer = make_layer(compiled)

    def refused(words, shape=SHAPE, **changes):
        with pytest.raises(ValueError, match=words):
            compile_layers(
                compiled, shape, [layer, dataclasses.replace(layer, **changes)], norm(96)
            )

    foreign = ReferenceKernels().PackedLinear(torch.randn(96, 160))
    refused("no layer of these", down=foreign)
    refused("must map 96 to 320", gate_up=layer.o)
    refused("mlp_norm", mlp_norm=norm(95))
    refused("key_cache", key_cache=layer.key_cache.float())
    refused("key_scales", key_scales=torch.ones(40, 2, 8))
    refused("cos_sin", cos_sin=torch.ones(64, 10))
    refused("go together", q_full_norm=vector(192))
    refused("must be one of", mlp_norm=NormWeights("batch"))
    refused("negative", group=-1)
    refused("activation", shape=dataclasses.replace(SHAPE, activation="tanh"))
    with pytest.raises(ValueError, match="needs layers"):
        compile_layers(compiled, SHAPE, [], norm(96))


def can_populate() -> bool:
    """Whether the system maps pages ahead when told to: Linux from 5.14 on."""
    pages = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    address, size = ctypes.c_void_p(pages.data_ptr()), ctypes.c_size_t(pages.nbytes)
    return ctypes.CDLL(None).madvise(address, size, 23) == 0  # MADV_POPULATE_WRITE


def resident_bytes(cache: torch.Tensor) -> int:
    """What of the cache the system has mapped."""
    small = -(-cache.nbytes // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * small)()
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(cache.data_ptr()), ctypes.c_size_t(cache.nbytes)
    assert libc.mincore(address, size, flags) == 0
    return sum(flag & 1 for flag in flags) * mmap.PAGESIZE


@pytest.mark.skipif(not can_populate(), reason="the system can't map pages ahead")
@pytest.mark.parametrize(("blocks", "pages"), [(1, 1), (512, 1.5), (1024, 2), (1025, 1)])
def test_pages_of_the_cache_are_mapped_ahead(compiled, threads, blocks, pages):
    """A page holds 1,024 blocks; with half of it written half of the caches have the next one."""
    torch.manual_seed(2)
    shape, page = (4096, SHAPE.num_kv_heads, BLOCK_SIZE, 64), 2**21
    size = dataclasses.replace(SHAPE, head_dim=64, num_heads=2)
    layers = []
    for _ in range(2):
        caches = [compiled.new_kv_cache(shape, torch.bfloat16) for _ in range(2)]
        q = size.num_heads * size.head_dim
        qkv = compiled.PackedLinear(torch.randn(q + 4 * 64, size.hidden_size))
        o = compiled.PackedLinear(torch.randn(size.hidden_size, q))
        names = ("key_cache", "value_cache", "qkv", "o")
        layers.append(make_layer(compiled, **dict(zip(names, [*caches, qkv, o]))))
    decoder = compile_layers(compiled, size, layers, norm(size.hidden_size))
    slot, one = torch.tensor([blocks * BLOCK_SIZE - 1]), torch.ones(1, dtype=torch.int32)
    table = torch.tensor([[blocks - 1]], dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    hidden = torch.randn(1, size.hidden_size)
    decoder(hidden, torch.tensor([0]), slot, table, one, starts)
    caches = [cache for layer in layers for cache in (layer.key_cache, layer.value_cache)]
    assert sum(map(resident_bytes, caches)) == pages * page * len(caches)
