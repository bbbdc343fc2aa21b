"""Decode steps of head sizes and groups of heads that fill nothing, with windows, to the bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.compiled_decoder import EmbeddingAndHead
from kernels.interface import KernelSet
from tests.covering import covering
from tests.kernels import test_decoder, test_step
from tests.kernels.decoder_layers import compile_layers
from tests.kernels.test_decoder import BLOCK_SIZE, SHAPE, make_layer, norm, one_by_one
from tests.kernels.test_step import LENGTHS, ROWS, VOCAB, make_tables

SIZES = [(5, 1, 80), (6, 2, 96), (7, 7, 112), (12, 4, 256), (9, 3, 40), (1, 1, 1), (15, 5, 20)]


@covering(cache=["bfloat16", "int8"], window=[0, 7, 8], sizes=SIZES)
def test_a_step_of_odd_heads_is_what_its_parts_are(
    compiled: KernelSet,
    sizes: tuple[int, int, int],
    window: int,
    cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One group of layers has a window; names of blocks that fell out of it are wild."""
    heads, kv_heads, size = sizes
    torch.manual_seed(size * 10 + window)
    shape = dataclasses.replace(SHAPE, num_heads=heads, num_kv_heads=kv_heads, head_dim=size)
    for module in (test_decoder, test_step):
        monkeypatch.setattr(module, "SHAPE", shape)
    angle = torch.rand(64, max(1, size // 4))
    options = {"cos_sin": torch.cat((angle.cos(), angle.sin()), -1) if size > 1 else None}
    layers = [
        make_layer(
            compiled,
            group=index % 2,
            window=window * (index % 2),
            **options,
            **(test_decoder.int8_caches() if cache == "int8" else {}),
        )
        for index in range(4)
    ]
    tables, offset = make_tables(2), (torch.tensor(LENGTHS) - 1)[ROWS]
    for row in ROWS if window else ():
        seen = max(0, LENGTHS[row] - window) // BLOCK_SIZE
        tables.block_tables[1][row, :seen] = 10**9
    last = norm(shape.hidden_size)
    decoder = compile_layers(compiled, shape, layers, last)
    assert decoder is not None
    embedding, head = (
        compiled.PackedLinear(torch.randn(VOCAB, shape.hidden_size)) for _ in range(2)
    )
    step = decoder.compile_step(EmbeddingAndHead(embedding, head), tables)
    assert step is not None
    caches = [cache for layer in layers for cache in (layer.key_cache, layer.value_cache)]
    initial_copies = [cache.clone() for cache in caches]
    positions = [
        (
            table[ROWS, offset // BLOCK_SIZE].long() * BLOCK_SIZE + offset % BLOCK_SIZE,
            table[ROWS].contiguous(),
        )
        for table in tables.block_tables
    ]
    batch = [offset, *positions[0], (offset + 1).int(), torch.arange(len(ROWS) + 1).int()]
    x = embedding.rows(tables.tokens[ROWS, offset].long())
    hidden = one_by_one(compiled, shape, layers, last, x, batch, None, positions[1:])
    expected, written = compiled.argmax(head(hidden)).tolist(), [cache.clone() for cache in caches]
    for changed, old in zip(caches, initial_copies, strict=True):
        changed.copy_(old)
    assert step.bind(torch.tensor(ROWS), None)() == [[token] for token in expected]
    assert all(map(torch.equal, caches, written))


def test_query_heads_that_do_not_share_the_others_evenly_are_refused(compiled: KernelSet) -> None:
    shape = dataclasses.replace(SHAPE, num_heads=7)
    with pytest.raises(ValueError, match="share the key/value heads"):
        compile_layers(compiled, shape, [make_layer(compiled)], norm(SHAPE.hidden_size))
