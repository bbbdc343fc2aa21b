"""`CompiledDecoder` of the CPU: the layers as a table of addresses that C++ reads."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.compiled_decoder import (
    BatchTables,
    CompiledStep,
    EmbeddingAndHead,
    KVCache,
    LatentLayer,
    SharedBlock,
    StateLayer,
)
from kernels.cpu import abi as c
from kernels.cpu.latents import describe_latents
from kernels.cpu.library import (
    CACHE_DTYPES,
    Library,
    address,
    check,
    check_dense,
    check_scales,
    describe_norm,
    sparse_args,
    vector_address,
)
from kernels.cpu.lora import CpuLoraTable, LoraSegments, NativeLora
from kernels.cpu.memory import num_threads
from kernels.cpu.mixers import describe_state
from kernels.cpu.moe import CpuExperts, activation_of, handle_of, sizes_of
from kernels.cpu.ranks import address_of_kv_ranks
from kernels.cpu.ssm import describe_rows
from kernels.cpu.step import CpuStep, layer_indices
from kernels.interface import (
    NO_NORM,
    ActivationSpec,
    AttentionWeights,
    AuxStateBuffer,
    CompiledDecoder,
    DecoderLayer,
    DecoderShape,
    HeadNormWeights,
    LinearLayer,
    NormWeights,
    RankGroup,
)
from kernels.lora import LayerLoras, LoraTable, PackedLora, TableSegment
from kernels.ssm import StateRows


class CpuDecoder(CompiledDecoder):
    """The layers as C++ structs; owns the tensors and layers to which these point."""

    def __init__(
        self,
        library: Library,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        caches: Sequence[KVCache | None],
        groups: Sequence[int],
        final_norm: NormWeights,
        states: Sequence[StateLayer | None] = (),
        latents: Sequence[LatentLayer | None] = (),
        blocks: Sequence[SharedBlock | None] = (),
        kv_ranks: RankGroup | None = None,
    ) -> None:
        count = len(layers)
        states = states or [None] * count
        latents = latents or [None] * count
        blocks = blocks or [None] * count
        if not layers or any(
            len(part) != count for part in (caches, groups, states, latents, blocks)
        ):
            raise ValueError("a decoder needs layers, each with a cache or None, and a group")
        if kv_ranks is not None and any(part is not None for part in (*latents, *blocks)):
            raise ValueError("ranks share its latents or shared blocks")
        attentions = [
            None if cache is None else of or _attention(layer if block is None else block)
            for layer, cache, of, block in zip(layers, caches, latents, blocks)
        ]
        attending = [
            (attention, cache)
            for attention, cache in zip(attentions, caches)
            if attention is not None and cache is not None
        ]
        _check(shape, attending, groups)
        self.hidden_size = shape.hidden_size
        self._scales_gates = shape.mlp_gate_scale != 1.0
        self._has_attention = bool(attending)
        self._state_blocks = {len(state.scan_states) for state in states if state is not None}
        described_states = [
            None if state is None else describe_state(shape, state) for state in states
        ]
        described_blocks = [
            None if block is None else _shared_block(shape, block) for block in blocks
        ]
        described_latents = [None if of is None else describe_latents(shape, of) for of in latents]
        parts = list(zip(described_states, described_latents, described_blocks))
        self._references = (layers, caches, final_norm, states, latents, blocks, parts, kv_ranks)
        table = (c.DecoderLayer * len(layers))(
            *(
                _layer(shape, layer, attention, cache, group, part)
                for layer, attention, cache, group, part in zip(
                    layers, attentions, caches, groups, parts
                )
            )
        )
        last = describe_norm("final_norm", final_norm, shape.hidden_size)
        described = _shape(shape, attending, kv_ranks)
        handle = library.decoder_new(
            ctypes.byref(described), table, len(layers), ctypes.byref(last)
        )
        if not handle:
            raise MemoryError("no memory for the decoder's table of layers")
        self._handle, self._run, self._library = handle, library.decoder_run, library
        self._sizes = [
            _sizes(layer, of, state) for layer, of, state in zip(layers, attentions, states)
        ]
        weakref.finalize(self, library.decoder_free, handle).atexit = False  # as in `CpuLinear`

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        rows: Tensor | None = None,
        other_groups: Sequence[tuple[Tensor, Tensor]] = (),
        adapters: Sequence[TableSegment] = (),
        inputs: AuxStateBuffer | None = None,
        states: StateRows | None = None,
    ) -> Tensor:
        if self._state_blocks and states is None:
            raise ValueError("layers with states need blocks")
        tokens, sequences = hidden.shape[0], block_tables.shape[0]
        check_dense("hidden", hidden, (tokens, self.hidden_size), torch.float32)
        check_dense("positions", positions, (tokens,), torch.int64)
        groups = (c.DecoderGroup * (1 + len(other_groups)))()
        for group, (slots, tables) in zip(groups, ((slot_mapping, block_tables), *other_groups)):
            check_dense("slot_mapping", slots, (tokens,), torch.int64)
            check_dense("block_tables", tables, (sequences, tables.shape[-1]), torch.int32)
            group.slots, group.block_tables = slots.data_ptr(), tables.data_ptr()
            group.table_stride = tables.shape[-1]
        check_dense("seq_lens", seq_lens, (sequences,), torch.int32)
        check_dense("query_start_loc", query_start_loc, (sequences + 1,), torch.int32)
        # -1 for all rows, since an empty tensor has no address either.
        num_rows, rows_address = -1, None
        if rows is not None:
            check_dense("rows", rows, rows.shape, torch.int64)
            num_rows, rows_address = rows.shape[0], rows.data_ptr()
        loras, taps, inputs_address = LoraSegments(adapters), layer_indices((), 0), None
        if inputs is not None:
            taps = layer_indices(inputs.layers, len(self._sizes))
            check_dense(
                "inputs", inputs.states, (tokens, len(taps) * self.hidden_size), torch.float32
            )
            inputs_address = inputs.states.data_ptr()
        described = None
        if states is not None and self._state_blocks:
            described = describe_rows(states, tokens, *self._state_blocks)
        out = torch.empty((tokens if rows is None else num_rows, self.hidden_size))
        status = self._run(
            self._handle, out.data_ptr(), hidden.data_ptr(), tokens, positions.data_ptr(), groups,
            len(groups), seq_lens.data_ptr(), query_start_loc.data_ptr(), sequences,
            rows_address, num_rows, loras.table, loras.count, taps, len(taps), inputs_address,
            None if described is None else ctypes.byref(described), num_threads(),
        )  # fmt: skip
        if status:
            check(status)
        return out

    def lora_table(self, layers: LayerLoras) -> LoraTable | None:
        if self._scales_gates:
            return None
        supported = all(layer.keys() <= sizes.keys() for layer, sizes in zip(layers, self._sizes))
        return CpuLoraTable(layers, self._sizes) if supported else None

    def compile_step(
        self, ends: EmbeddingAndHead, tables: BatchTables, taps: Sequence[int] = ()
    ) -> CompiledStep:
        numbers = layer_indices(taps, len(self._sizes))
        blocks = tables.state_tokens
        if self._state_blocks != (set() if blocks is None else {len(blocks)}):
            raise ValueError("tables with states go with layers that have some, of as many blocks")
        if not self._has_attention:
            tables = replace(tables, block_tables=())
        decoder = self._handle, self
        return CpuStep(self._library, decoder, self.hidden_size, ends, tables, numbers)


def _sizes(
    layer: DecoderLayer, attention: Attention | None, state: StateLayer | None
) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers that adapters may change, by slot."""
    slots: dict[str, LinearLayer] = {}
    if isinstance(attention, AttentionWeights):
        slots = {"qkv": attention.qkv, "o": attention.o}
    if state is not None:
        slots |= {"state_in": state.inputs, "state_out": state.output}
        optional = {
            "state_selection": state.selection,
            "state_rates": state.rates,
            "state_gates": state.gates,
        }
        slots |= {slot: linear for slot, linear in optional.items() if linear is not None}
    if layer.mlp is not None:
        slots |= {"up": layer.mlp.up, "down": layer.mlp.down}
    sizes = {slot: (linear.row_size, linear.out_features) for slot, linear in slots.items()}
    experts = None if layer.experts is None else layer.experts.layers
    return sizes if experts is None else sizes | sizes_of(experts)


Attention = AttentionWeights | LatentLayer


def _attention(layer: DecoderLayer | SharedBlock) -> AttentionWeights:
    if not isinstance(layer.attention, AttentionWeights):
        raise ValueError("some layers have no keys and values")
    return layer.attention


def _shared_block(shape: DecoderShape, block: SharedBlock) -> c.SharedBlock:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    up = inner * (2 if shape.gated else 1)
    return c.SharedBlock(
        attention_norm=describe_norm("attention_norm", block.attention_norm, 2 * hidden),
        mlp_norm=describe_norm("mlp_norm", block.mlp_norm, hidden),
        mixer_norm=describe_norm("mixer_norm", block.mixer_norm, hidden),
        gate_up=handle_of("gate_up", block.mlp.up, (hidden, up)),
        down=handle_of("down", block.mlp.down, (inner, hidden)),
        output=handle_of("output", block.output, (hidden, hidden)),
        added=c.LoraLayer(
            qkv=_added(block.qkv_added, block.attention.qkv),
            up=_added(block.up_added, block.mlp.up),
        ),
    )


def _added(added: PackedLora | None, layer: LinearLayer) -> int | None:
    """Return the address of an addition. Raises ValueError unless it's the layer's."""
    if added is None:
        return None
    if not isinstance(added, NativeLora):
        raise ValueError("an addition must be packed by these kernels")
    if (added.in_features, added.out_features) != (layer.in_features, layer.out_features):
        raise ValueError(f"an addition maps {added.in_features} to {added.out_features} values")
    return added.address


def _shape(
    shape: DecoderShape,
    attending: list[tuple[Attention, KVCache]],
    kv_ranks: RankGroup | None,
) -> c.DecoderShape:
    # Without attention there are no blocks; these values aren't used.
    blocks, block_size, cache_dtype = 0, 1, torch.float32
    if attending:
        keys = attending[0][1][0]
        (blocks, _, block_size, _), cache_dtype = keys.shape, keys.dtype
    ranks = address_of_kv_ranks(kv_ranks, block_size) if attending else None
    if kv_ranks is not None:
        block_size *= kv_ranks.size
    table = _rotary_table(attending)
    max_position, rotary = (0, 0) if table is None else table.shape
    factors = shape.normed_residual
    act = ActivationSpec(shape.activation, shape.activation_limit, shape.activation_alpha)
    return c.DecoderShape(
        hidden=shape.hidden_size,
        q_heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_size=shape.head_dim,
        inner=shape.intermediate_size,
        num_blocks=blocks,
        block_size=block_size,
        max_position=max_position,
        rotary=rotary,
        eps=shape.norm_eps,
        scale=shape.attention_scale or shape.head_dim**-0.5,
        soft_cap=shape.attention_soft_cap,
        residual_scale=shape.residual_scale,
        cache_dtype=CACHE_DTYPES[cache_dtype],
        neox=shape.rope_neox,
        gated=shape.gated,
        parallel=shape.wiring == "parallel",
        round_inputs=shape.round_attention,
        act=activation_of(act),
        clip_qkv=shape.clip_qkv,
        attention_output_scale=shape.attention_output_scale,
        mlp_gate_scale=shape.mlp_gate_scale,
        mlp_output_scale=shape.mlp_output_scale,
        attention_output_gate=shape.attention_output_gate,
        normed_residual=bool(factors),
        attention_residual=factors[0] if factors else 0.0,
        state_residual=factors[1] if factors else 0.0,
        mlp_residual=factors[2] if factors else 0.0,
        ranks=ranks,
    )


def _head_norm(name: str, norm: HeadNormWeights | None, heads: int, size: int) -> c.HeadNorm:
    if norm is None:
        return c.HeadNorm(weight=None, bias=None, stride=0)
    rows = norm.weight.shape[0]
    if rows not in (1, heads):
        raise ValueError(f"{name} must have 1 or {heads} rows")
    check_dense(name, norm.weight, (rows, size), torch.float32)
    stride = size if rows > 1 else 0
    bias = vector_address(name, norm.bias, size)
    return c.HeadNorm(weight=norm.weight.data_ptr(), bias=bias, stride=stride)


def _layer(
    shape: DecoderShape,
    layer: DecoderLayer,
    attention: Attention | None,
    cache: KVCache | None,
    group: int,
    parts: tuple[c.StateLayer | None, c.LatentLayer | None, c.SharedBlock | None],
) -> c.DecoderLayer:
    mlp, mlp_norm = layer.mlp, layer.mlp_norm or NO_NORM
    hidden, size, inner = shape.hidden_size, shape.head_dim, shape.intermediate_size
    state, latents, block = parts
    described = c.DecoderLayer(
        input_norm=describe_norm("input_norm", layer.input_norm, hidden),
        attention_out_norm=describe_norm("attention_out_norm", layer.attention_out_norm, hidden),
        mlp_norm=describe_norm("mlp_norm", mlp_norm, hidden),
        gate_up=handle_of(
            "gate_up", None if mlp is None else mlp.up, (hidden, inner * (2 if shape.gated else 1))
        ),
        down=handle_of("down", None if mlp is None else mlp.down, (inner, hidden)),
        experts=_experts(shape, layer),
        mlp_out_norm=describe_norm("mlp_out_norm", layer.mlp_out_norm, hidden),
        group=group,
        state=_address(state),
        latents=_address(latents),
        shared=_address(block),
    )
    if attention is None or cache is None:
        if state is None and described.gate_up is None and described.experts is None:
            raise ValueError("a layer must have attention, a state, an MLP or experts")
        return described
    q, kv = shape.num_heads * size, shape.num_kv_heads * size
    keys, values, key_scales, value_scales = cache
    described.cos_sin = address(attention.cos_sin)
    described.key_cache, described.value_cache = address(keys), address(values)
    described.key_scales, described.value_scales = address(key_scales), address(value_scales)
    if isinstance(attention, LatentLayer):
        # Keys and values are the same numbers, divided by the keys' scale.
        described.value_scales = described.key_scales
        width = shape.num_heads * attention.out_of.layers[0].out_features
        described.o = handle_of("o", attention.output, (width, hidden))
        return described
    all_q, all_kv = q * (1 + shape.attention_output_gate), kv
    if attention.q_full_norm is not None and attention.k_full_norm is not None:
        # These norms are over all ranks' heads.
        all_q, all_kv = len(attention.q_full_norm), len(attention.k_full_norm)
        if (all_q, all_kv) != (q, kv) and getattr(attention.qkv, "ranks", None) is None:
            raise ValueError("norms over all heads are over those of this rank without others")
    described.qkv = handle_of(
        "qkv", attention.qkv, (hidden if block is None else 2 * hidden, all_q + 2 * all_kv)
    )
    described.q_norm = vector_address("q_norm", attention.q_norm, size)
    described.k_norm = vector_address("k_norm", attention.k_norm, size)
    described.q_full_norm = vector_address("q_full_norm", attention.q_full_norm, all_q)
    described.k_full_norm = vector_address("k_full_norm", attention.k_full_norm, all_kv)
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    described.q_head_norm = _head_norm("q_head_norm", attention.q_head_norm, heads, size)
    described.k_head_norm = _head_norm("k_head_norm", attention.k_head_norm, kv_heads, size)
    described.window, described.sparse = attention.window, sparse_args(attention.sparse)
    described.alibi = vector_address("alibi", attention.alibi, heads)
    described.sinks = vector_address("sinks", attention.sinks, heads)
    described.o = handle_of("o", attention.o, (q, hidden))
    return described


def _address(struct: ctypes.Structure | None) -> int | None:
    return None if struct is None else ctypes.addressof(struct)


def _experts(shape: DecoderShape, layer: DecoderLayer) -> int | None:
    experts = layer.experts
    if experts is not None and layer.mlp is not None:
        raise ValueError("a layer has either an MLP or experts")
    if experts is None:
        return None
    if not isinstance(experts, CpuExperts) or experts.hidden_size != shape.hidden_size:
        raise ValueError(f"experts must be of these kernels, over {shape.hidden_size} values")
    if shape.wiring == "parallel":
        raise ValueError("a parallel layer has no experts")
    return experts.address


def _check(
    shape: DecoderShape,
    attending: list[tuple[Attention, KVCache]],
    groups: Sequence[int],
) -> None:
    """Raise ValueError for layers that don't fit the shape or each other."""
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError("a decoder needs query heads that share the key/value heads")
    if min(groups) < 0:
        raise ValueError("a layer's group must not be negative")
    table = _rotary_table(attending)
    for attention, cache in attending:
        if isinstance(attention, AttentionWeights) and (
            (attention.q_full_norm is None) != (attention.k_full_norm is None)
        ):
            raise ValueError("q_full_norm and k_full_norm go together")
        _check_cache(shape, cache, attending[0][1][0])
        cos_sin = attention.cos_sin
        if table is None or cos_sin is None:
            continue
        check_dense("cos_sin", cos_sin, table.shape, torch.float32)
        if cos_sin.shape[1] % 2 or cos_sin.shape[1] > shape.head_dim:
            raise ValueError(f"cos_sin {list(cos_sin.shape)} doesn't fit heads of {shape.head_dim}")


def _rotary_table(attending: list[tuple[Attention, KVCache]]) -> Tensor | None:
    """Return the table of the first layer with rotary embedding; all tables have the same shape."""
    tables = (attention.cos_sin for attention, _ in attending)
    return next((table for table in tables if table is not None), None)


def _check_cache(shape: DecoderShape, cache: KVCache, first: Tensor) -> None:
    """Raise ValueError for a cache that doesn't fit the heads or the first layer's keys."""
    keys, values, key_scales, value_scales = cache
    cache_shape = (first.shape[0], shape.num_kv_heads, first.shape[2], shape.head_dim)
    check_dense("key_cache", keys, cache_shape, first.dtype)
    check_dense("value_cache", values, cache_shape, first.dtype)
    check_scales(keys, key_scales, value_scales)
