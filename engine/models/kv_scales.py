"""Scales of fp8 KV caches: from the checkpoint, or measured by a pass over a sample text at load.

A key or value is divided by its layer's scale (or its head's) before it's rounded. e4m3 holds up to
448, with a relative error that's the same from 2^-6 on: without scales larger keys are cut off, and
tiny values are lost.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.cache import KVScales
from engine.models.context import AttentionContext
from engine.models.decoder import NativeDecoder
from engine.models.spec import DecoderSpec
from engine.models.weights import WeightReader
from engine.text.tokenizer import Tokenizer

BLOCK_SIZE = 16
MOST_TOKENS = 512
#: Other texts may have larger keys than the sample: so much room is left above its largest.
ROOM = 2.0

SAMPLE = """The quick brown fox jumps over the lazy dog, and 3.14159 isn't 22/7. She asked: "Why?"
def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs) if xs else 0.0
{"id": 17, "name": "Zoë", "tags": ["a", "b"], "ok": true}
Der Zug fährt um 8:45 Uhr ab. ¿Dónde está la biblioteca? Il pleut à Paris. Привет, мир!
今日は天気がいいですね。 机器学习很有趣。 مرحبا بالعالم
1. First, boil 2 litres of water. 2. Add salt; then wait 10 minutes. 3. Serve at once.
SELECT name, COUNT(*) FROM orders WHERE total > 99.95 GROUP BY name ORDER BY 2 DESC;
In 1905 the paper showed that $E = mc^2$; nobody, however, had measured it to 1 part in 10^6.
"""


def read_kv_scales(weights: object, spec: DecoderSpec) -> list[KVScales | None]:
    """What the checkpoint says, by layer; None where it says nothing.

    Known are k_scale and v_scale beside the attention's weights, or of its key and value
    projections (also as output_scale), and one kv_scale for both. -1 stands for none; where one
    of the two is there, it is for both.

    Raises `ModelLoadError`, which names the tensor, for others than positive finite numbers.
    """
    found: list[KVScales | None] = []
    for index in range(spec.num_layers):
        at = spec.names.layer.format(index) + spec.names.o.rpartition(".")[0] + "."
        keys, values = (
            _first(weights, spec, [at + name.format(part) for name in _NAMES]) for part in "kv"
        )
        keys, values = (values if keys is None else keys), (keys if values is None else values)
        found.append(None if keys is None or values is None else KVScales(keys, values))
    return found


_NAMES = (
    "{0}_scale", "attn.{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale",
)  # fmt: skip


def _first(weights: object, spec: DecoderSpec, names: list[str]) -> Tensor | None:
    if not isinstance(weights, WeightReader):
        return None
    for full in names:
        for name in (full, full.removeprefix(spec.names.optional_prefix)):
            scale = weights.numbers(name)
            if scale is None or bool((scale == -1).all()):
                continue
            if scale.numel() not in (1, spec.num_kv_heads):
                why = f"has {scale.numel()} values, not 1 or {spec.num_kv_heads}"
                raise _wrong(name, why)
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise _wrong(name, "isn't positive and finite")
            return scale.flatten()
    return None


def _wrong(name: str, why: str) -> ModelLoadError:
    return ModelLoadError(f"{name!r} {why}.", param=name.rpartition(".")[2])


def sample_tokens(tokenizer: Tokenizer | None, vocab_size: int, most: int) -> list[int]:
    """Tokens of the sample text, filled up with random ones."""
    ids = [] if tokenizer is None else tokenizer.encode_plain(SAMPLE)
    rng = random.Random(0)
    kept = [token for token in ids[: most // 2] if token < vocab_size]
    return kept + [rng.randrange(vocab_size) for _ in range(most - len(kept))]


@torch.inference_mode()
def measure_kv_scales(
    model: NativeDecoder, token_ids: list[int], dtype: torch.dtype
) -> list[KVScales]:
    """Scales by KV head for a cache of `dtype`, so that twice the largest value still fits.

    Runs one pass on a cache of its own, which holds what was written exactly. Raises
    `ModelLoadError` where a layer's keys or values aren't finite.
    """
    device, count = model.ops.device, len(token_ids)
    blocks = -(-count // BLOCK_SIZE)
    model.allocate_kv(blocks, BLOCK_SIZE, model.ops.activation_dtype(model.weight_dtype))
    place = torch.arange(count, device=device)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    context = AttentionContext(
        positions=place,
        slot_mapping=place,
        block_tables=torch.arange(blocks, **ints)[None],
        seq_lens=torch.tensor([count], **ints),
        query_start_loc=torch.tensor([0, count], **ints),
        logits_rows=place[-1:],
    )
    model.forward(torch.tensor(token_ids, device=device), context)
    limit = torch.finfo(dtype).max
    found = []
    for index, cache in enumerate(model.kv_caches):
        keys, values = (
            part.float().abs().amax((0, 2, 3)) * ROOM / limit for part in (cache.keys, cache.values)
        )
        if not bool(torch.isfinite(torch.cat((keys, values))).all()):
            raise ModelLoadError(
                f"Layer {index}'s keys or values aren't finite on the sample text.", param="model"
            )
        found.append(KVScales(*(torch.where(part > 0, part, 1.0) for part in (keys, values))))
    model.release_kv()
    return found


def calibrate(
    model: NativeDecoder, tokenizer: Tokenizer | None, max_model_len: int, dtype: torch.dtype
) -> None:
    """Measure the scales of those layers that the checkpoint has none for."""
    tokens = sample_tokens(tokenizer, model.spec.vocab_size, min(MOST_TOKENS, max_model_len))
    measured = measure_kv_scales(model, tokens, dtype)
    given = model.kv_scales or [None] * len(measured)
    model.kv_scales = [own or found for own, found in zip(given, measured, strict=True)]
