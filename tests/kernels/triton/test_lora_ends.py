"""Adapters of an embedding and of an output layer in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from kernels.lora import EMBEDDING, EMBEDDING_ROWS, HEAD, EmbeddingWeights, LoraSlice, LoraWeights
from kernels.triton.lora import TritonLoraSlots
from tests.kernels.tolerance import assert_close
from tests.kernels.triton.test_lora import CPU, rows_of

VOCAB, HIDDEN, LAST = 90, 70, 4
TARGETS = {(LAST, end): 1 for end in (EMBEDDING, EMBEDDING_ROWS, HEAD)}


def embedding(dtype, *, rank=0, table=False, names=()):
    def some(*shape):
        return torch.randn(shape).to(dtype)

    return EmbeddingWeights(
        table=some(VOCAB, HIDDEN) if table else None,
        tokens=(torch.tensor(names), some(len(names), HIDDEN)) if names else None,
        inner=some(VOCAB, rank) if rank else None,
        b=some(HIDDEN, rank) if rank else None,
        scale=0.3,
    )


def expected_of(x, ids, weights, rows):
    """In float64."""
    x = x.double()
    for row in rows:
        token = int(ids[row])
        if weights.table is not None:
            x[row] = weights.table[token].double()
        if weights.tokens is not None and token in weights.tokens[0].tolist():
            x[row] = weights.tokens[1][weights.tokens[0].tolist().index(token)].double()
        if weights.inner is not None:
            x[row] += weights.scale * weights.b.double() @ weights.inner[token].double()
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_of_adapters_among_rows_of_none(dtype):
    """A table, single tokens (the first, the last, none between), low rank; and all of them."""
    torch.manual_seed(2)
    slots = TritonLoraSlots(TARGETS, 6, 40, dtype, CPU)
    all_value = [
        embedding(dtype, rank=17),
        embedding(dtype, table=True),
        embedding(dtype, names=[0, 5, 6, 40, VOCAB - 1]),
        embedding(dtype, rank=3, table=True, names=[7]),
        embedding(dtype),
    ]
    tables = [slots.put([{}] * LAST + [slots.pack_embedding(one)]) for one in all_value]
    owner = torch.arange(40) % (len(all_value) + 1) - 1
    ids = torch.randint(0, VOCAB, (40,))
    ids[3::6] = torch.tensor([0, 5, 6, 7, VOCAB - 1, 39, 41])  # of the adapter of single tokens
    ids[10] = 7
    x = torch.randn(40, HIDDEN)
    expected = x
    for index, weights in enumerate(all_value):
        rows = (owner == index).nonzero().flatten().tolist()
        expected = expected_of(expected, ids, weights, rows)
    groups = [(tables[i].slot, (owner == i).nonzero().flatten().tolist())
              for i in range(len(all_value))]  # fmt: skip
    initial_copy = x.clone()
    slots.embed(LAST, x, ids, rows_of(slots, groups, 40))
    assert_close(x, expected, dtype, 8.0)
    for untouched in (-1, len(all_value) - 1):
        assert torch.equal(x[owner == untouched], initial_copy[owner == untouched])


def test_an_output_layer_adds_to_float32_logits_of_bfloat16_states():
    torch.manual_seed(4)
    dtype = torch.bfloat16
    slots = TritonLoraSlots(TARGETS, 2, 16, dtype, CPU)
    a, b = (torch.randn(5, HIDDEN) / 9).to(dtype), torch.randn(VOCAB, 5).to(dtype)
    gain = torch.rand(VOCAB) + 0.5
    lora = LoraWeights(a=a, parts=[LoraSlice(0, b, 0, 2.0)], out_features=VOCAB, gain=gain)
    table = slots.put([{}] * LAST + [{HEAD: slots.pack(lora)}])
    logits, hidden = torch.randn(3, VOCAB), torch.randn(3, HIDDEN).to(dtype)
    expected = logits.double()
    expected[1:] += 2.0 * hidden[1:].double() @ a.double().T @ b.double().T
    expected[1:] *= gain.double()
    slots.add((LAST, HEAD), logits, hidden, rows_of(slots, [(table.slot, [1, 2])], 3))
    assert_close(logits, expected, dtype, 8.0)


def test_what_does_not_fit_is_refused():
    slots = TritonLoraSlots(TARGETS, 1, 16, torch.float32, CPU)
    with pytest.raises(ValueError, match="ranks above 16"):
        slots.pack_embedding(embedding(torch.float32, rank=17))
    x, rows = torch.zeros(2, HIDDEN), rows_of(slots, [], 2)
    with pytest.raises(ValueError, match="don't fit"):
        slots.embed(LAST, x, torch.zeros(2, dtype=torch.int32), rows)
