"""Batch-invariant kernels in Triton's interpreter: a row's bits don't depend on the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from triton import language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float

import kernels
from engine import LLM
from engine.contract.errors import ConfigError
from kernels.attention_args import AttentionArgs
from kernels.triton.attention import paged_attention
from kernels.triton.batch_invariant import InvariantTritonKernels
from kernels.triton.moe import route
from tests.engine.models import make_model
from tests.kernels import oracle
from tests.kernels.batches import Batch, make_batch
from tests.kernels.tolerance import assert_close
from tests.survey.one_result import Cut, Watch, run

Attention = Callable[..., Tensor]
#: A chunk of a prompt whose keys go over several splits, a prompt, a decode, nothing.
SEQUENCES = [(9, 75), (3, 3), (1, 70), (0, 9)]
OPTIONS = [
    {},
    {"sliding_window": 20},
    {
        "sliding_window": 50,
        "soft_cap": 3.0,
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "sinks": torch.tensor([0.5, -0.5, 1.0, 0.0]),
    },
]


def dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
    """A product that sums all rows of a tile alike, as matrix units do; numpy's goes by a row's
    place."""
    remaining_view, right = (
        _convert_float(x.data, x.dtype, tl.float16, None).view(np.float16)
        if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating()
        else x.data
        for x in (a, b)
    )
    terms = remaining_view.astype(np.float32)[:, :, None] * right.astype(np.float32)[None]
    return TensorHandle(d.data + terms.sum(1).astype(d.data.dtype), d.dtype.scalar)


@pytest.fixture(autouse=True)
def rows_alike(monkeypatch):
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.fixture(scope="module")
def ops() -> InvariantTritonKernels:
    return InvariantTritonKernels("cpu", "asked for")


def one_by_one(batch: Batch, attention: Attention, sequences=SEQUENCES, **options) -> Tensor:
    """Each row as a decode of its own."""
    full_arguments, rows, offset = batch.arguments(), [], 0
    for number, (count, length) in enumerate(sequences):
        for index in range(count):
            isolated = full_arguments | {
                "q": full_arguments["q"][offset : offset + 1],
                "block_tables": full_arguments["block_tables"][number : number + 1],
                "seq_lens": torch.tensor([length - count + index + 1], dtype=torch.int32),
                "query_start_loc": torch.tensor([0, 1], dtype=torch.int32),
            }
            rows.append(attention(AttentionArgs(**isolated, **options)))
            offset += 1
    return torch.cat(rows)


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "window", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_chunk_is_that_of_its_decode(dtype, options, ops):
    batch = make_batch(SEQUENCES, dtype=dtype, size=32, heads=4, kv_heads=2)
    args = AttentionArgs(**batch.arguments(), **options)
    together = ops.paged_attention(args)
    assert torch.equal(together, one_by_one(batch, ops.paged_attention, **options))
    assert_close(together, oracle.paged_attention(args), dtype, 4.0)


def test_without_it_decodes_and_chunks_differ(ops):
    """Else the tests here would show nothing."""
    prompt = [(20, 75)]  # too many queries for the tiles of decodes
    batch = make_batch(prompt, size=32, heads=4, kv_heads=2)
    together = paged_attention(AttentionArgs(**batch.arguments()))
    assert not torch.equal(together, one_by_one(batch, paged_attention, prompt))


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_doesnt_depend_on_the_others(dtype, quantization, ops):
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(40, 130, generator=generator), torch.randn(40, generator=generator)
    x = torch.randn(19, 130, generator=generator).to(dtype)
    layer = ops.PackedLinear(weight.to(dtype), bias, quantization=quantization)
    together = layer(x)
    assert torch.equal(together, torch.cat([layer(x[row : row + 1]) for row in range(len(x))]))
    if quantization is None:
        wide = weight.to(dtype).double()
        assert_close(together, x.double() @ wide.T + bias.double(), dtype, 4.0)
    else:
        assert layer.fixed_tile


def test_a_tokens_experts_dont_depend_on_the_others(ops):
    generator = torch.Generator().manual_seed(2)
    x, router = torch.randn(7, 32, generator=generator), torch.randn(7, 5, generator=generator)
    gate_up, down = (
        torch.randn(5, 48, 32, generator=generator),
        torch.randn(5, 32, 24, generator=generator),
    )
    weights, ids = route(router, 2)
    together = ops.fused_experts(x, gate_up, down, weights, ids)
    isolated = [
        ops.fused_experts(x[i : i + 1], gate_up, down, weights[i : i + 1], ids[i : i + 1])
        for i in range(len(x))
    ]
    assert torch.equal(together, torch.cat(isolated))


def test_an_engine_gives_one_result(monkeypatch, tmp_path):
    monkeypatch.setenv(kernels.FORCED, "triton")
    llm = LLM(
        str(make_model("llama", tmp_path, num_hidden_layers=1)), dtype="float32", device="cpu",
        num_gpu_blocks_override=60, max_model_len=128, batch_invariant=True,
    )  # fmt: skip
    assert llm.core.executor.worker.loaded.model.ops.batch_invariant
    prompt, watch = tuple(7 * index % 380 for index in range(12)), Watch()
    (full,) = run(llm, watch, (*prompt, 0, 0), Cut(num_prompt_tokens=len(prompt)))
    run(
        llm,
        watch,
        full,
        Cut(num_prompt_tokens=len(prompt) + 1, chunk=5, other_sequences=(prompt[:4],)),
    )
    assert watch.again > 0
    assert not watch.differing


def test_plain_torch_and_other_attention_are_refused(tmp_path):
    folder = str(make_model("llama", tmp_path, num_hidden_layers=1))
    settings = {"num_gpu_blocks_override": 60, "max_model_len": 128, "batch_invariant": True}
    with pytest.raises(ConfigError, match="plain torch") as baseline_error:
        LLM(folder, cpu_kernels=False, **settings)
    assert baseline_error.value.param == "batch_invariant"
    with pytest.raises(ConfigError, match="TORCH_SDPA can't be used") as other:
        LLM(folder, attention_backend="TORCH_SDPA", **settings)
    assert other.value.param == "attention_backend"
