"""The structs that Python fills in and C++ reads, each named as in C++.

Their fields, sizes and offsets must be those that the compiler chose: `check_structs` compares them
when the library is loaded, so that no field is ever read as another.
"""

from __future__ import annotations

import ctypes

from kernels.attention_args import BlockSparse
from kernels.errors import StructMismatch

L, N, F, P = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p

Field = tuple[int, int, str]
"""Offset and size in bytes; "pointer", "integer", "float" or "struct"."""


class Activation(ctypes.Structure):
    """Declared in gate.h."""

    _fields_ = [("kind", N), ("limit", F), ("alpha", F)]


class Norm(ctypes.Structure):
    """Declared in ops.h."""

    _fields_ = [("weight", P), ("bias", P), ("kind", L)]


class HeadNorm(ctypes.Structure):
    """Declared in decoder.h."""

    _fields_ = [("weight", P), ("bias", P), ("stride", L)]


class Sparse(ctypes.Structure):
    """Declared in attention.h."""

    _fields_ = [(name, L) for name in ("block", "local", "stride", "head_step")]

    @classmethod
    def of(cls, sparse: BlockSparse | None) -> Sparse:
        """The same; without a block: all tokens are seen.

        Raises ValueError for sizes that name no blocks.
        """
        if sparse is None:
            return cls(0, 0, 0, 0)
        sizes = (sparse.block, sparse.local, sparse.stride)
        if min(sizes) < 1 or sparse.head_step < 0 or max(*sizes, sparse.head_step) >= 1 << 31:
            raise ValueError(f"{sparse} must have sizes from 1 to 2^31")
        return cls(sparse.block, sparse.local, sparse.stride, sparse.head_step)


class AttentionArgs(ctypes.Structure):
    """Declared in attention.h."""

    _fields_ = [
        *((name, P) for name in ("q", "out")),
        *((name, L) for name in ("q_stride", "tokens", "q_heads", "kv_heads", "head_size")),
        *((name, P) for name in ("key_cache", "value_cache", "key_scales", "value_scales")),
        *((name, L) for name in ("num_blocks", "block_size")),
        ("block_tables", P),
        ("table_stride", L),
        *((name, P) for name in ("seq_lens", "starts")),
        ("num_seqs", L),
        *((name, P) for name in ("alibi", "sinks")),
        ("window", L),
        ("sparse", Sparse),
        *((name, F) for name in ("scale", "soft_cap")),
        *((name, N) for name in ("dtype", "cache_dtype")),
        ("rows", P),
        ("num_rows", L),
    ]


class RopeArgs(ctypes.Structure):
    """Declared in ops.h."""

    _fields_ = [
        *((name, P) for name in ("q", "k", "v")),
        *((name, L) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, L) for name in ("tokens", "q_heads", "kv_heads", "head_size")),
        *((name, P) for name in ("positions", "cos_sin")),
        *((name, L) for name in ("max_position", "rotary")),
        *((name, P) for name in ("key_cache", "value_cache", "key_scales", "value_scales")),
        *((name, L) for name in ("num_blocks", "block_size")),
        *((name, P) for name in ("slots", "q_norm", "k_norm")),
        ("eps", F),
        *((name, N) for name in ("norm_dtype", "neox", "dtype", "cache_dtype")),
    ]


class Experts(ctypes.Structure):
    """Declared in experts.h."""

    _fields_ = [
        *((name, L) for name in ("hidden", "count", "top_k", "inner", "shared_inner")),
        *((name, L) for name in ("groups", "top_groups", "group_best")),
        *((name, P) for name in ("router", "gate_up", "down", "shared_gate_up", "shared_down")),
        *((name, P) for name in ("shared_gate", "choice_bias")),
        *((name, N) for name in ("softmax_first", "sigmoid", "renormalize")),
        ("scale", F),
        ("act", Activation),
    ]


class DecoderShape(ctypes.Structure):
    """Declared in decoder.h."""

    _fields_ = [
        *((name, L) for name in ("hidden", "q_heads", "kv_heads", "head_size", "inner")),
        *((name, L) for name in ("num_blocks", "block_size", "max_position", "rotary")),
        *((name, F) for name in ("eps", "scale", "soft_cap", "residual_scale")),
        *((name, N) for name in ("cache_dtype", "neox", "gated", "parallel")),
        ("act", Activation),
        ("clip_qkv", F),
    ]


class DecoderLayer(ctypes.Structure):
    """Declared in decoder.h."""

    _fields_ = [
        ("input_norm", Norm),
        *((name, P) for name in ("qkv", "q_norm", "k_norm", "q_full_norm", "k_full_norm")),
        *((name, HeadNorm) for name in ("q_head_norm", "k_head_norm")),
        *((name, P) for name in ("cos_sin", "key_cache", "value_cache", "key_scales")),
        ("value_scales", P),
        ("window", L),
        ("sparse", Sparse),
        *((name, P) for name in ("alibi", "sinks", "o")),
        *((name, Norm) for name in ("attention_out_norm", "mlp_norm")),
        *((name, P) for name in ("gate_up", "down", "experts")),
        ("mlp_out_norm", Norm),
        ("group", L),
    ]


class DecoderGroup(ctypes.Structure):
    """Declared in decoder.h."""

    _fields_ = [("slots", P), ("block_tables", P), ("table_stride", L)]


class StepEnds(ctypes.Structure):
    """Declared in step.h."""

    _fields_ = [
        *((name, P) for name in ("decoder", "embedding", "head", "positions")),
        *((name, L) for name in ("num_positions", "position_offset")),
        *((name, F) for name in ("embedding_scale", "logit_scale")),
        ("taps", P),
        ("num_taps", L),
    ]


class BlockTable(ctypes.Structure):
    """Declared in step.h."""

    _fields_ = [("blocks", P), ("stride", L)]


class StepTables(ctypes.Structure):
    """Declared in step.h."""

    _fields_ = [
        ("tokens", P),
        ("token_stride", L),
        ("block_tables", P),
        ("num_groups", L),
        *((name, P) for name in ("num_prompt", "num_tokens", "num_computed")),
        ("num_rows", L),
    ]


class StepChoice(ctypes.Structure):
    """Declared in step.h."""

    _fields_ = [(name, P) for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "edits")]


class StepResult(ctypes.Structure):
    """Declared in step.h."""

    _fields_ = [
        *((name, P) for name in ("out", "got", "open", "ids", "values", "ranks")),
        ("most", L),
        ("hidden", P),
    ]


class RowEdits(ctypes.Structure):
    """Declared in edits.h."""

    _fields_ = [
        ("allowed", P),
        ("forbidden", P),
        ("num_forbidden", L),
        *((name, P) for name in ("words", "word_starts")),
        ("num_words", L),
        ("ends", P),
        *((name, L) for name in ("num_ends", "min_tokens")),
        *((name, P) for name in ("biased", "biases")),
        ("num_biased", L),
        *((name, F) for name in ("repetition", "frequency", "presence")),
        ("counts_prompt", N),
        ("num_logprobs", L),
    ]


class LoraPart(ctypes.Structure):
    """Declared in lora.h."""

    _fields_ = [
        ("b", P),
        *((name, L) for name in ("first", "columns", "start", "rank")),
        ("scale", F),
    ]


class LoraLinear(ctypes.Structure):
    """Declared in lora.h."""

    _fields_ = [
        ("a", P),
        *((name, L) for name in ("n", "rank", "k")),
        ("parts", P),
        ("num_parts", L),
        *((name, P) for name in ("gain", "shift")),
        *((name, N) for name in ("dtype", "pairs")),
    ]


class LoraLayer(ctypes.Structure):
    """Declared in lora.h."""

    _fields_ = [
        *((name, P) for name in ("qkv", "o", "up", "down")),
        *((name, P) for name in ("router", "shared_up", "shared_down", "shared_gate")),
        *((name, P) for name in ("expert_ups", "expert_downs")),
    ]


class LoraGroup(ctypes.Structure):
    """Declared in lora.h."""

    _fields_ = [("layers", P), ("rows", P), ("count", L)]


class LoraUse(ctypes.Structure):
    """Declared in lora.h."""

    _fields_ = [("linear", P), ("rows", P), ("count", L)]


class LoraInputs(ctypes.Structure):
    """Declared in lora.h."""

    _fields_ = [(name, L) for name in ("from", "to", "rank", "first", "count", "k")]


class LoraOutputs(ctypes.Structure):
    """Declared in lora.h."""

    _fields_ = [(name, L) for name in ("from", "to", "columns", "rank", "pairs")]


class StateRows(ctypes.Structure):
    """Declared in states.h."""

    _fields_ = [
        *((name, P) for name in ("starts", "rows")),
        *((name, L) for name in ("num_seqs", "tokens", "num_rows")),
    ]


class CausalConv(ctypes.Structure):
    """Declared in states.h."""

    _fields_ = [
        *((name, P) for name in ("out", "x")),
        *((name, L) for name in ("stride", "channels", "width")),
        *((name, P) for name in ("states", "weight", "bias")),
        ("of", StateRows),
    ]


class LinearScan(ctypes.Structure):
    """Declared in states.h."""

    _fields_ = [
        *((name, P) for name in ("out", "q", "k", "v", "rate", "beta")),
        *((name, L) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, L) for name in ("rate_stride", "beta_stride")),
        *((name, P) for name in ("decay", "rate_bias", "skip", "states")),
        *((name, L) for name in ("heads", "key_heads", "value_size", "key_size")),
        *((name, F) for name in ("least_rate", "most_rate")),
        ("delta", N),
        ("of", StateRows),
    ]


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    Activation, Norm, HeadNorm, Sparse, AttentionArgs, RopeArgs, Experts, DecoderShape,
    DecoderLayer, DecoderGroup, StepEnds, BlockTable, StepTables, StepChoice, StepResult, RowEdits,
    LoraPart, LoraLinear, LoraLayer, LoraGroup, LoraUse, LoraInputs, LoraOutputs, StateRows,
    CausalConv, LinearScan,
)  # fmt: skip


def check_structs(listing: str) -> None:
    """Compare `STRUCTS` with what the library says of its own (structs.cpp).

    Raises `StructMismatch`, which names the first struct and field that differ.
    """
    sizes, fields = _parse(listing)
    for struct in STRUCTS:
        name = struct.__name__
        if name not in sizes:
            raise StructMismatch(name, None, "missing in the library")
        ours, theirs = _fields(struct), fields[name]
        for field in (*ours, *theirs):
            if ours.get(field) != theirs.get(field):
                told = f"{_told(theirs, field)} in the library, {_told(ours, field)} in Python"
                raise StructMismatch(name, field, told)
        if sizes[name] != ctypes.sizeof(struct):
            told = f"{sizes[name]} bytes in the library, {ctypes.sizeof(struct)} in Python"
            raise StructMismatch(name, None, told)
    for name in sizes.keys() - {struct.__name__ for struct in STRUCTS}:
        raise StructMismatch(name, None, "missing in Python")


def _parse(listing: str) -> tuple[dict[str, int], dict[str, dict[str, Field]]]:
    sizes: dict[str, int] = {}
    fields: dict[str, dict[str, Field]] = {}
    for line in listing.splitlines():
        name, *facts = line.split()
        struct, _, field = name.partition(".")
        if field:
            offset, size, kind = facts
            fields[struct][field] = int(offset), int(size), kind
        else:
            sizes[struct], fields[struct] = int(facts[0]), {}
    return sizes, fields


def _fields(struct: type[ctypes.Structure]) -> dict[str, Field]:
    def one(name: str, of: type) -> Field:
        place = getattr(struct, name)
        return place.offset, place.size, _kind(of)

    return {name: one(name, of) for name, of, *_ in struct._fields_}


def _kind(of: type) -> str:
    if issubclass(of, ctypes.Structure):
        return "struct"
    return "pointer" if of is P else "float" if of in (F, ctypes.c_double) else "integer"


def _told(fields: dict[str, Field], name: str) -> str:
    if name not in fields:
        return "missing"
    offset, size, kind = fields[name]
    return f"{size} bytes at {offset} ({kind})"
