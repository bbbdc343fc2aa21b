"""The backends that run here, against float64; those that don't, against stand-ins."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from kernels.attention import flash, flex, rocm_aiter, sdpa
from kernels.attention import flashinfer as infer
from kernels.attention_args import AttentionArgs, BlockSparse
from tests.kernels import oracle
from tests.kernels.batches import make_batch
from tests.kernels.tolerance import assert_close

MIX = [(1, 1), (7, 7), (0, 9), (1, 17), (16, 16), (33, 40)]
SLOPES = {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, SLOPES], ids=str)
def test_sdpa(dtype, options):
    batch = make_batch(MIX, size=32, dtype=dtype, cache_dtype=torch.float32, strided=True)
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments(), **options))
    assert_close(
        sdpa.paged_attention(AttentionArgs(**batch.arguments(), **options)), expected, dtype, 8.0
    )


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9}, {"soft_cap": 4.0} | SLOPES, {"soft_cap": 3.0}], ids=str
)
def test_flex(options):
    batch = make_batch(MIX, size=32)
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments(), **options))
    out = torch.empty(batch.q.shape)
    got = flex.paged_attention(AttentionArgs(**batch.arguments(), **options, out=out))
    assert got is out
    assert_close(got, expected, torch.float32, 8.0)


@pytest.mark.parametrize("backend", [sdpa, flex])
@pytest.mark.parametrize("sequences", [[], [(0, 5)], [(1, 1)]])
def test_small_batches(backend, sequences):
    batch = make_batch(sequences, heads=2, kv_heads=2, size=32)
    got = backend.paged_attention(AttentionArgs(**batch.arguments()))
    assert_close(
        got, oracle.paged_attention(AttentionArgs(**batch.arguments())), torch.float32, 8.0
    )


@pytest.mark.parametrize("backend", [sdpa, flex, flash, infer])
def test_what_a_backend_does_not_do_is_refused(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in_flash())
    batch = make_batch(MIX, size=32)
    with pytest.raises(ValueError, match="sinks"):
        backend.paged_attention(AttentionArgs(**batch.arguments(), sinks=torch.zeros(4)))


def test_sdpa_refuses_a_soft_cap():
    with pytest.raises(ValueError, match="soft_cap"):
        sdpa.paged_attention(AttentionArgs(**make_batch(MIX, size=32).arguments(), soft_cap=1.0))


def stand_in_flash() -> types.ModuleType:
    """`flash_attn_with_kvcache` as its documentation has it: pages [page, heads, size]."""
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale,
        causal, window_size, softcap,
    ):  # fmt: skip
        assert causal
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        past_window, right = window_size
        assert right == (0 if past_window >= 0 else -1)
        return oracle.paged_attention(
            AttentionArgs(
                q,
                k_cache.transpose(1, 2),
                v_cache.transpose(1, 2),
                page_table,
                cache_seqlens,
                cu_seqlens_q,
                softmax_scale,
                sliding_window=past_window + 1,
                soft_cap=softcap,
            ),
        ).to(q.dtype)

    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def stand_in_aiter() -> types.ModuleType:
    """`unified_attention` as AITER has it: pages [page, token, head, size]."""
    module = types.ModuleType("aiter.ops.triton.unified_attention")

    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
        window_size, block_table, softcap, q_descale, k_descale, v_descale, sinks=None,
    ):  # fmt: skip
        assert causal
        assert q_descale is k_descale is v_descale is None
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= int(seqused_k.max())
        past_window, right = window_size
        assert right == (0 if past_window >= 0 else -1)
        pages = k.transpose(1, 2), v.transpose(1, 2)
        args = AttentionArgs(
            q, *pages, block_table, seqused_k, cu_seqlens_q, softmax_scale,
            sliding_window=past_window + 1, soft_cap=softcap, sinks=sinks,
        )  # fmt: skip
        out.copy_(oracle.paged_attention(args))

    module.unified_attention = unified_attention
    return module


def stand_in_infer() -> types.ModuleType:
    """The paged prefill wrapper as its documentation has it: pages by indptr, HND."""
    module = types.ModuleType("flashinfer")

    class Wrapper:
        def __init__(self, workspace, kv_layout):
            assert kv_layout == "HND"

        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
            num_qo_heads, num_kv_heads, head_dim_qk, page_size, *, causal, sm_scale, window_left,
            logits_soft_cap, q_data_type, kv_data_type,
        ):  # fmt: skip
            assert causal
            counts = paged_kv_indptr.diff()
            tables = torch.zeros((len(counts), max(1, int(counts.max()))), dtype=torch.int32)
            for row, count in enumerate(counts.tolist()):
                start = int(paged_kv_indptr[row])
                tables[row, :count] = paged_kv_indices[start : start + count]
            lengths = (counts - 1) * page_size + paged_kv_last_page_len
            self.arguments = (tables, lengths, qo_indptr, sm_scale)
            self.options = {"sliding_window": window_left + 1, "soft_cap": logits_soft_cap or 0.0}

        def run(self, q, paged_kv_cache):
            keys, values = paged_kv_cache
            out = oracle.paged_attention(
                AttentionArgs(q, keys, values, *self.arguments, **self.options)
            )
            return out.to(q.dtype)

    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    return module


@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"soft_cap": 4.0}], ids=str)
@pytest.mark.parametrize("backend", [flash, infer, rocm_aiter])
def test_libraries_get_what_their_documentation_asks_for(backend, options, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", stand_in_flash())
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in_infer())
    aiter = stand_in_aiter()
    monkeypatch.setitem(sys.modules, aiter.__name__, aiter)
    monkeypatch.setattr(infer, "WORKSPACE_BYTES", 1)
    infer._wrapper.cache_clear()
    batch = make_batch(MIX, size=32)
    expected = oracle.paged_attention(AttentionArgs(**batch.arguments(), **options))
    assert_close(
        backend.paged_attention(AttentionArgs(**batch.arguments(), **options)),
        expected,
        torch.float32,
    )
    infer._wrapper.cache_clear()


@pytest.mark.parametrize("backend", [sdpa, flex, flash, infer, rocm_aiter])
def test_blocks_are_hidden_or_refused(backend):
    args = AttentionArgs(**make_batch(MIX, size=32).arguments(), sparse=BlockSparse(4, 1, 3, 1))
    with pytest.raises(ValueError, match="no block-sparse attention"):
        backend.paged_attention(args)
