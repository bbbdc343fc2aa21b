"""Rows as Q4_K and Q6_K, which llama.cpp's Python package reads but can't write.

The layouts are ggml's (ggml-common.h); how scales are chosen is plainer here than in llama.cpp: the
least squared error among a few candidates for each group.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from engine.checkpoints.gguf.names import gguf_name

SUPER = 256
"""Values that share a block."""


def q4_k_m(layers: int, tied: bool) -> dict[str, Kind]:
    """What llama.cpp's mix keeps in six bits, by GGUF's names; all else has four.

    Values and the MLP's way down of the first and last eighth of the layers and of every third one
    between, and the output layer.
    """
    eighth = layers // 8
    more = [
        i for i in range(layers)
        if i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
    ]  # fmt: skip
    names = [f"model.layers.{i}.{of}.weight" for i in more for of in _MORE_BITS]
    names.append("model.embed_tokens.weight" if tied else "lm_head.weight")
    return {gguf_name(name, "llama"): Kind.Q6_K for name in names}


_MORE_BITS = ("self_attn.v_proj", "mlp.down_proj")
_FALLBACKS = {Kind.Q4_K: Kind.Q5_0, Kind.Q6_K: Kind.Q8_0}


def fitting(kind: Kind, columns: int) -> Kind:
    """`kind`, or what llama.cpp takes in its place for rows that aren't whole blocks."""
    return kind if columns % gguf.GGML_QUANT_SIZES[kind][0] == 0 else _FALLBACKS[kind]


def _halves(x: np.ndarray) -> np.ndarray:
    """The bytes of float16, uint8 [n, 2]."""
    return x.astype(np.float16)[:, None].view(np.uint8)


def _rounded_halves(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def _safe_divide(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """x / by, and 0 where that is 0 / 0 or x / 0."""
    return np.divide(x, by, out=np.zeros(np.broadcast(x, by).shape, np.float32), where=by != 0)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """Sixteen groups of 16, each with a scale of 8 bits."""
    groups = blocks.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    best, min_tensor = np.zeros_like(largest), np.full(largest.shape, np.inf, np.float32)
    for tenths in range(-9, 10):
        inverse = _safe_divide(np.float32(-(32 + 0.1 * tenths)), largest)
        q = np.clip(np.rint(groups * inverse), -32, 31)
        scale = _safe_divide((groups * q).sum(-1, keepdims=True), (q * q).sum(-1, keepdims=True))
        error = ((groups - scale * q) ** 2).sum(-1, keepdims=True)
        best, min_tensor = np.where(error < min_tensor, scale, best), np.minimum(error, min_tensor)
    top = np.take_along_axis(best[..., 0], np.abs(best[..., 0]).argmax(-1)[:, None], -1)
    full = _rounded_halves(top / -128)
    scales = np.clip(np.rint(_safe_divide(best[..., 0], full)), -128, 127)
    q = (
        np.clip(np.rint(_safe_divide(groups, (full * scales)[..., None])), -32, 31).astype(np.int8)
        + 32
    )
    quarters = q.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = sum(quarters[:, :, i] >> 4 << 2 * i for i in range(4))
    parts = low, high, scales.astype(np.int8).view(np.uint8)
    return np.concatenate([*(p.reshape(len(q), -1) for p in parts), _halves(full[:, 0])], 1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """Eight groups of 32, each with a scale and a minimum of 6 bits."""
    groups = blocks.reshape(-1, 8, 32)
    scales, minima = _scale_and_minimum(groups)
    d, dmin = (_rounded_halves(x.max(-1, keepdims=True) / 63) for x in (scales, minima))
    s, m = (
        np.clip(np.rint(_safe_divide(x, by)), 0, 63).astype(np.uint8)
        for x, by in ((scales, d), (minima, dmin))
    )
    steps = _safe_divide(groups + (dmin * m)[..., None], (d * s)[..., None])
    q = np.clip(np.rint(steps), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(q), -1)
    first = s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6
    packed = (*first, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4)
    return np.concatenate([_halves(d[:, 0]), _halves(dmin[:, 0]), *packed, nibbles], 1)


def _scale_and_minimum(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both at least 0, float32 [..., groups]: a value is scale * q - minimum, q from 0 to 15."""
    low = np.minimum(groups.min(-1, keepdims=True), 0)
    width = groups.max(-1, keepdims=True) - low
    best = np.zeros(low.shape, np.float32), -low
    min_tensor = np.full(low.shape, np.inf, np.float32)
    for twentieths in range(-10, 21):
        inverse = _safe_divide(np.float32(15 + 0.05 * twentieths), width)
        q = np.clip(np.rint((groups - low) * inverse), 0, 15)
        # The line through (q, value) of least squares.
        about = q - q.mean(-1, keepdims=True)
        scale = _safe_divide(
            (about * groups).sum(-1, keepdims=True), (about**2).sum(-1, keepdims=True)
        )
        minimum = np.maximum(scale * q.mean(-1, keepdims=True) - groups.mean(-1, keepdims=True), 0)
        error = ((scale * q - minimum - groups) ** 2).sum(-1, keepdims=True)
        better = (error < min_tensor) & (scale >= 0)
        best = np.where(better, scale, best[0]), np.where(better, minimum, best[1])
        min_tensor = np.where(better, error, min_tensor)
    return best[0][..., 0], best[1][..., 0]


K_WRITERS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {Kind.Q4_K: _q4_k, Kind.Q6_K: _q6_k}
"""float32 [blocks, 256] -> uint8 [blocks, bytes of a block]."""


def k_quantized(value: np.ndarray, kind: Kind) -> np.ndarray:
    """uint8 [rows, bytes of a row], or [experts, rows, ...], of floats whose rows are blocks."""
    packed = K_WRITERS[kind](value.astype(np.float32).reshape(-1, SUPER))
    return packed.reshape(*value.shape[:-1], -1)
