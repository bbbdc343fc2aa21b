"""`CpuKernels`: checks the arguments, then calls the library.

A call costs one to three microseconds more than the kernel itself, so the checks are few and cheap:
those that prevent C++ from reading or writing outside of a tensor.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs
from kernels.cpu import abi as c
from kernels.cpu.decoder import CpuDecoder
from kernels.cpu.library import (
    CACHE_DTYPES,
    DTYPES,
    Library,
    address,
    check,
    check_dense,
    check_norms,
    check_scales,
    per_head,
    sparse_args,
)
from kernels.cpu.linear import CODINGS, make_linear
from kernels.cpu.lora import CpuLora, CpuLoraTemplate, add_lora
from kernels.cpu.memory import bind_threads, lazy_zeros, leave_threads, num_threads, use_threads
from kernels.cpu.moe import KINDS, CpuExperts, CpuHeadLinears
from kernels.cpu.ranks import CpuRankGroup, address_of_kv_ranks, shared_bytes
from kernels.cpu.sparse_index import select_tokens
from kernels.cpu.ssm import causal_conv, diagonal_scan, linear_scan, lru_inputs
from kernels.interface import (
    CompiledDecoder,
    DecoderLayer,
    DecoderShape,
    ExpertLayers,
    KernelSet,
    KVCache,
    LatentLayer,
    LinearLayer,
    NormWeights,
    ScanInputs,
    ScanWeights,
    SharedBlock,
    StateLayer,
    StateRows,
)
from kernels.layers import Activation
from kernels.linear_factory import RowSlice, WeightFormat
from kernels.logit_edits import TopLogprobs
from kernels.lora import LoraLayout, LoraSegment, LoraTemplate, LoraWeights, PackedLora
from kernels.ranks import Exchange, RankGroup
from kernels.tensors import (
    check_caches,
    check_logits,
    check_rotary,
    check_vector,
    describe,
    norm_width,
    token_stride,
)

GELU = {"none": 1, "tanh": 2}
SIGMOID = 6


class CpuKernels(KernelSet):
    """`KernelSet` of the compiled library. Raises `CpuKernelsUnavailable` if there is none."""

    batch_invariant = True
    codings = frozenset(CODINGS)
    supports_act_order = True
    supports_int8_zero_points = True
    widens_weights = True

    def __init__(self, isa: str | None = None) -> None:
        self.library = library = Library(isa)
        self.name, self.why = f"cpu-{library.isa}", library.description
        self.version = library.path.stem
        # Looked up once, since each attribute look-up costs as much as passing an argument.
        self._rms_norm, self._add_rms_norm = library.rms_norm, library.add_rms_norm
        self._gate_and_mul = library.gate_and_mul
        self._rope_and_cache = library.rope_and_cache
        self._paged_attention = library.paged_attention
        self._argmax, self._sample = library.argmax, library.sample
        self._top_logprobs = library.top_logprobs

    def use_threads(
        self, count: int, cpus: Sequence[int] | None = None, *, spread: bool = True
    ) -> None:
        use_threads(count)
        if cpus is not None:
            bind_threads(self.library, cpus)
        elif not spread:
            leave_threads(self.library)

    def num_threads(self) -> int:
        return num_threads()

    def pack_lora(self, lora: LoraWeights) -> PackedLora:
        return CpuLora(self.library, lora)

    def lora_template(self, plans: Sequence[LoraLayout], dtype: torch.dtype) -> LoraTemplate | None:
        return CpuLoraTemplate(self.library, plans, dtype)

    def add_lora(self, y: Tensor, x: Tensor, uses: Sequence[LoraSegment]) -> None:
        add_lora(self.library, y, x, uses)

    def make_linear(
        self,
        shape: tuple[int, int],
        slices: Iterable[RowSlice],
        form: WeightFormat,
        bias: Tensor | None = None,
    ) -> LinearLayer:
        return make_linear(self.library, shape, slices, form, bias)

    def rank_memory_bytes(self, size: int) -> int:
        return shared_bytes(self.library, size)

    def join_ranks(
        self,
        memory: mmap.mmap,
        rank: int,
        size: int,
        timeout_s: float,
        exchange: Exchange | None = None,
    ) -> CpuRankGroup:
        return CpuRankGroup(self.library, memory, rank, size, timeout_s, exchange)

    def head_linears(self, layers: Sequence[LinearLayer]) -> CpuHeadLinears:
        return CpuHeadLinears(self.library, layers)

    def compile_experts(self, experts: ExpertLayers) -> CpuExperts:
        return CpuExperts(self.library, experts)

    def compile_decoder(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        caches: Sequence[KVCache | None],
        groups: Sequence[int],
        final_norm: NormWeights,
        states: Sequence[StateLayer | None] = (),
        latents: Sequence[LatentLayer | None] = (),
        blocks: Sequence[SharedBlock | None] = (),
        kv_ranks: RankGroup | None = None,
    ) -> CompiledDecoder:
        return CpuDecoder(
            self.library,
            shape,
            layers,
            caches,
            groups,
            final_norm,
            states,
            latents,
            blocks,
            kv_ranks,
        )

    def new_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return lazy_zeros(shape, dtype)

    def map_pages(self, cache: Tensor) -> None:
        if not cache.is_contiguous():
            raise ValueError(f"the cache must be contiguous, got {describe(cache)}")
        self.library.map_pages(cache.data_ptr(), cache.nbytes)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty_like(x)
        width = norm_width(x, weight)
        status = self._rms_norm(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), x.numel() // width, width, eps,
            DTYPES[x.dtype], DTYPES[weight.dtype], num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape != residual.shape or x.dtype != residual.dtype:
            raise ValueError(f"x {describe(x)} and residual {describe(residual)} differ")
        if not residual.is_contiguous():
            raise ValueError("residual must be contiguous")
        x = x.contiguous()
        out = torch.empty_like(x)
        width = norm_width(x, weight)
        status = self._add_rms_norm(
            out.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
            x.numel() // width, width, eps, DTYPES[x.dtype], DTYPES[weight.dtype],
            num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out

    def causal_conv(
        self,
        x: Tensor,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of: StateRows,
        *,
        silu: bool = True,
    ) -> Tensor:
        return causal_conv(self.library, x, states, weight, bias, of, silu=silu)

    def linear_scan(
        self,
        inputs: ScanInputs,
        weights: ScanWeights,
        states: Tensor,
        of: StateRows,
        scales: Tensor | None = None,
    ) -> Tensor:
        return linear_scan(self.library, inputs, weights, states, of, scales)

    def select_tokens(
        self, queries: Tensor, factors: Tensor, keys: Tensor, visible: Tensor, top_k: int
    ) -> Tensor:
        return select_tokens(self.library, queries, factors, keys, visible, top_k)

    def diagonal_scan(self, x: Tensor, decay: Tensor, states: Tensor, of: StateRows) -> Tensor:
        return diagonal_scan(self.library, x, decay, states, of)

    def lru_inputs(
        self, x: Tensor, gates: Tensor, biases: Tensor, decay: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        return lru_inputs(self.library, x, gates, biases, decay, positions)

    def activation(self, name: str) -> Activation:
        return partial(self._activate, KINDS[name])

    def _activate(self, kind: int, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        status = self.library.activate(
            out.data_ptr(), x.data_ptr(), x.numel() // max(1, width), width, kind, DTYPES[x.dtype],
            num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, 0)

    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        if approximate not in GELU:
            raise ValueError(f'approximate must be "none" or "tanh", got {approximate!r}')
        return self._gate(x, GELU[approximate])

    def sigmoid_and_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        return self._gate(torch.cat((gate, x), dim=-1), SIGMOID)

    def _gate(self, x: Tensor, kind: int) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        if width % 2:
            raise ValueError(f"x {describe(x)} has no two halves")
        out = torch.empty((rows, width // 2), dtype=x.dtype)
        status = self._gate_and_mul(
            out.data_ptr(), x.data_ptr(), rows, width // 2, kind, DTYPES[x.dtype],
            num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out

    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        q_norm_weight: Tensor | None = None,
        k_norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        neox: bool = True,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        tokens, q_heads, size = q.shape
        blocks, kv_heads, block_size, _ = check_caches(key_cache, value_cache, size)
        scales = check_scales(key_cache, key_scales, value_scales)
        if k.shape != (tokens, kv_heads, size) or v.shape != k.shape:
            raise ValueError(
                f"k {describe(k)} and v {describe(v)} don't go with q {describe(q)} and the cache"
            )
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}")
        check_vector("positions", positions, tokens, torch.int64)
        check_vector("slot_mapping", slot_mapping, tokens, torch.int64)
        max_position, rotary = check_rotary(cos_sin, size)
        norm_dtype = check_norms(q_norm_weight, k_norm_weight, size)
        args = c.RopeArgs(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            q_stride=token_stride(q),
            k_stride=token_stride(k),
            v_stride=token_stride(v),
            tokens=tokens,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_size=size,
            positions=positions.data_ptr(),
            cos_sin=address(cos_sin),
            max_position=max_position,
            rotary=rotary,
            key_cache=key_cache.data_ptr(),
            value_cache=value_cache.data_ptr(),
            key_scales=scales[0],
            value_scales=scales[1],
            num_blocks=blocks,
            block_size=block_size,
            slots=slot_mapping.data_ptr(),
            q_norm=address(q_norm_weight),
            k_norm=address(k_norm_weight),
            eps=eps,
            norm_dtype=norm_dtype,
            neox=neox,
            dtype=DTYPES[q.dtype],
            cache_dtype=CACHE_DTYPES[key_cache.dtype],
        )
        if status := self._rope_and_cache(ctypes.byref(args), num_threads()):
            check(status)

    def paged_attention(self, args: AttentionArgs) -> Tensor:
        q, key_cache, tables, out = args.q, args.key_cache, args.block_tables, args.out
        tokens, q_heads, size = q.shape
        blocks, kv_heads, block_size, _ = check_caches(key_cache, args.value_cache, size)
        scales = check_scales(key_cache, args.key_scales, args.value_scales)
        if q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads don't share {kv_heads} key/value heads")
        sequences = tables.shape[0]
        check_vector("seq_lens", args.seq_lens, sequences, torch.int32)
        check_vector("query_start_loc", args.query_start_loc, sequences + 1, torch.int32)
        if tables.dtype != torch.int32 or not tables.is_contiguous():
            raise ValueError("block_tables must be contiguous int32")
        if args.visible_ends is not None:
            check_vector("visible_ends", args.visible_ends, tokens, torch.int32)
        if (bias := args.distance_bias) is not None:
            if args.soft_cap or args.alibi_slopes is not None:
                raise ValueError("CPU_ATTN does no bias by distance beside ALiBi or a soft cap")
            check_dense("distance_bias", bias, (q_heads, bias.shape[-1]), torch.float32)
        if out is None:
            out = torch.empty((tokens, q_heads, size), dtype=q.dtype)
        elif out.shape != q.shape or out.dtype != q.dtype or not out.is_contiguous():
            raise ValueError(f"out {describe(out)} must be contiguous and like q {describe(q)}")
        arguments = c.AttentionArgs(
            q=q.data_ptr(),
            out=out.data_ptr(),
            q_stride=token_stride(q),
            tokens=tokens,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_size=size,
            key_cache=key_cache.data_ptr(),
            value_cache=args.value_cache.data_ptr(),
            key_scales=scales[0],
            value_scales=scales[1],
            num_blocks=blocks,
            block_size=block_size,
            block_tables=tables.data_ptr(),
            table_stride=tables.shape[1],
            seq_lens=args.seq_lens.data_ptr(),
            starts=args.query_start_loc.data_ptr(),
            num_seqs=sequences,
            alibi=per_head("alibi_slopes", args.alibi_slopes, q_heads),
            sinks=per_head("sinks", args.sinks, q_heads),
            window=args.sliding_window,
            sparse=sparse_args(args.sparse),
            scale=args.scale,
            soft_cap=args.soft_cap,
            dtype=DTYPES[q.dtype],
            cache_dtype=CACHE_DTYPES[key_cache.dtype],
            num_rows=-1,
            round_inputs=args.round_inputs,
            visible_ends=address(args.visible_ends),
            distance_bias=address(bias),
            num_distances=0 if bias is None else bias.shape[1],
            ranks=address_of_kv_ranks(args.ranks, block_size),
        )
        if status := self._paged_attention(ctypes.byref(arguments), num_threads()):
            check(status)
        return out

    def encoder_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        length: int,
        *,
        reach: int = 0,
        round_inputs: bool = False,
    ) -> Tensor:
        tokens, heads, size = q.shape
        num_seqs = tokens // length
        dtype = torch.bfloat16 if round_inputs else q.dtype

        def as_cache(x: Tensor) -> Tensor:
            """Return x with a block per sequence, of an even size as bfloat16 products require."""
            cache = torch.empty((num_seqs, heads, length + length % 2, size), dtype=dtype)
            cache[:, :, :length] = x.unflatten(0, (-1, length)).transpose(1, 2)
            cache[:, :, length:] = 0
            return cache

        ends = torch.full((tokens,), length, dtype=torch.int32)
        if reach:
            ends = torch.arange(reach + 1, reach + 1 + length, dtype=torch.int32)
            ends = ends.clamp(max=length).repeat(num_seqs)
        return self.paged_attention(
            AttentionArgs(
                q=q,
                key_cache=as_cache(k),
                value_cache=as_cache(v),
                block_tables=torch.arange(num_seqs, dtype=torch.int32)[:, None],
                seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
                query_start_loc=torch.arange(0, tokens + 1, length, dtype=torch.int32),
                scale=size**-0.5,
                sliding_window=reach + 1 if reach else 0,
                visible_ends=ends,
                round_inputs=round_inputs,
            )
        )

    def argmax(self, logits: Tensor) -> Tensor:
        rows, vocab = check_logits(logits)
        out = torch.empty(rows, dtype=torch.int64)
        status = self._argmax(out.data_ptr(), logits.data_ptr(), rows, vocab, num_threads())
        if status:
            check(status)
        return out

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniforms: Tensor,
    ) -> Tensor:
        rows, vocab = check_logits(logits)
        check_vector("temperature", temperature, rows, torch.float32)
        check_vector("top_k", top_k, rows, torch.int64)
        check_vector("top_p", top_p, rows, torch.float64)
        check_vector("min_p", min_p, rows, torch.float64)
        check_vector("uniforms", uniforms, rows, torch.float64)
        out = torch.empty(rows, dtype=torch.int64)
        status = self._sample(
            out.data_ptr(), logits.data_ptr(), rows, vocab, temperature.data_ptr(),
            top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(), uniforms.data_ptr(),
            num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out

    def top_logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> TopLogprobs:
        rows, vocab = check_logits(logits)
        check_vector("tokens", tokens, rows, torch.int64)
        if not 0 <= k <= vocab:
            raise ValueError(f"k ({k}) must lie in 0 to {vocab}")
        ids = torch.empty((rows, 1 + k), dtype=torch.int64)
        values, ranks = torch.empty((rows, 1 + k)), torch.empty_like(ids)
        normalizers = torch.empty(rows)
        status = self._top_logprobs(
            ids.data_ptr(), values.data_ptr(), ranks.data_ptr(), normalizers.data_ptr(),
            logits.data_ptr(), rows, vocab, tokens.data_ptr(), k, num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return TopLogprobs(ids, values, ranks, normalizers)
