"""Scales of fp8 KV caches: from the checkpoint, or measured at load with a pass over a sample text.

A key or value is divided by its layer's or its head's scale before it is rounded. e4m3 represents
numbers up to 448, with the same relative error from 2^-6 on. Without scales larger keys are
clamped, and tiny values lose precision.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.contract.errors import ConfigError, ModelLoadError
from engine.models.decoder import NativeDecoder
from engine.models.decoder_spec import DecoderSpec
from engine.models.forward_context import AttentionMetadata, KVScales
from engine.text.tokenizer import Tokenizer

# `quantization_param_path`: scales of an e4m3 KV cache in a JSON file, in the format of vLLM.
#
# {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02,
# "1": 0.03}}}}: by tensor-parallel rank and layer, one number by which keys and values are divided.


PARAM = "quantization_param_path"
_DTYPE = "float8_e4m3fn"
#: Maximum size of a file, which has about thirty bytes for each layer.
_MAX_FILE_BYTES = 1 << 20
_MAX_SCALE = torch.finfo(torch.float32).max


def read_kv_scale_file(path: str, model_type: str, num_layers: int) -> list[KVScales]:
    """Read the scales of all layers. Raises `ConfigError` if they are invalid for the model."""
    document = _object(_parsed(path), "the file")
    file_model_type = document.get("model_type")
    if file_model_type is not None and file_model_type != model_type:
        raise _file_error(
            f"model_type is {_format_value(file_model_type)}, but the model's is {model_type!r}"
        )
    cache = _object(document.get("kv_cache"), "kv_cache")
    if cache.get("dtype") != _DTYPE:
        raise _file_error(f"kv_cache.dtype is {_format_value(cache.get('dtype'))}, not {_DTYPE!r}")
    ranks = _object(cache.get("scaling_factor"), "kv_cache.scaling_factor")
    if set(ranks) != {"0"}:
        raise _file_error(
            f"kv_cache.scaling_factor is of {len(ranks)} ranks: write it for one device, as rank 0"
        )
    field = "kv_cache.scaling_factor.0"
    layers = _object(ranks["0"], field)
    if set(layers) != {str(layer) for layer in range(num_layers)}:
        raise _file_error(f"{field} names {len(layers)} layers, which aren't 0 to {num_layers - 1}")
    return [_scale(f"{field}.{layer}", layers[str(layer)]) for layer in range(num_layers)]


def _parsed(path: str) -> Any:
    file = Path(path).expanduser()
    try:
        if not file.is_file():
            raise _file_error(f"there is no file {path!r}")
        with file.open("rb") as stream:
            text = stream.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise _file_error(f"the file has more than {_MAX_FILE_BYTES} bytes")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _file_error(f"{path!r} can't be read as JSON: {error}") from error


def _object(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _file_error(f"{name} must be an object")
    return value


def _scale(name: str, value: Any) -> KVScales:
    sound = type(value) in (int, float) and 0 < value <= _MAX_SCALE
    scale = torch.tensor([float(value) if sound else 0.0])
    if float(scale) == 0:  # also for numbers that float32 rounds to 0
        raise _file_error(f"{name} must be a positive finite number, not {_format_value(value)}")
    return KVScales(scale, scale)


def _file_error(why: str) -> ConfigError:
    return ConfigError(f"{PARAM}: {why}.", param=PARAM)


def _format_value(value: Any) -> str:
    return repr(value)[:60]


BLOCK_SIZE = 16
MAX_SAMPLE_TOKENS = 512
#: Margin above the sample's largest key, since other texts may have larger ones.
HEADROOM = 2.0

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


def read_kv_scales(
    read: Callable[[str], Tensor | None] | None, spec: DecoderSpec
) -> list[KVScales | None]:
    """Return the checkpoint's scales by layer; None for layers without them.

    `read` returns a tensor by name, None if it doesn't exist; it is None itself if the format has
    no such tensors.

    Supported are k_scale and v_scale beside the attention's weights or its key and value
    projections (also as output_scale), and one kv_scale for both. -1 stands for no scale; if only
    one of the two exists, it applies to both.

    Raises `ModelLoadError` with the tensor's name unless all are positive finite numbers.
    """
    scales: list[KVScales | None] = []
    for index in range(spec.num_layers):
        prefix = spec.names.layer.format(index) + spec.names.o.rpartition(".")[0] + "."
        keys, values = (
            _first(read, spec, [prefix + name.format(part) for name in _NAMES]) for part in "kv"
        )
        keys, values = (values if keys is None else keys), (keys if values is None else values)
        scales.append(None if keys is None or values is None else KVScales(keys, values))
    return scales


_NAMES = (
    "{0}_scale", "attn.{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale",
)  # fmt: skip


def _first(
    read: Callable[[str], Tensor | None] | None, spec: DecoderSpec, names: list[str]
) -> Tensor | None:
    if read is None:
        return None
    for full in names:
        for name in (full, full.removeprefix(spec.names.optional_prefix)):
            scale = read(name)
            if scale is None or bool((scale == -1).all()):
                continue
            if scale.numel() not in (1, spec.num_kv_heads):
                why = f"has {scale.numel()} values, not 1 or {spec.num_kv_heads}"
                raise _invalid_scale(name, why)
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                raise _invalid_scale(name, "isn't positive and finite")
            return scale.flatten()
    return None


def _invalid_scale(name: str, why: str) -> ModelLoadError:
    return ModelLoadError(f"{name!r} {why}.", param=name.rpartition(".")[2])


def sample_tokens(tokenizer: Tokenizer | None, vocab_size: int, count: int) -> list[int]:
    """Return tokens of the sample text, then random ones."""
    ids = [] if tokenizer is None else tokenizer.encode_as_text(SAMPLE)
    rng = random.Random(0)
    tokens = [token for token in ids[: count // 2] if token < vocab_size]
    return tokens + [rng.randrange(vocab_size) for _ in range(count - len(tokens))]


@torch.inference_mode()
def measure_kv_scales(
    model: NativeDecoder, token_ids: list[int], dtype: torch.dtype
) -> list[KVScales]:
    """Return scales by KV head for a cache of `dtype`, such that twice the largest value fits.

    Runs a forward pass on a separate cache in the activations' dtype. Raises `ModelLoadError` if a
    layer's keys or values aren't finite.
    """
    device, count = model.ops.device, len(token_ids)
    blocks = -(-count // BLOCK_SIZE)
    model.allocate_kv(blocks, BLOCK_SIZE, model.ops.activation_dtype(model.weight_dtype))
    positions = torch.arange(count, device=device)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    context = AttentionMetadata(
        positions=positions,
        slot_mapping=positions,
        block_tables=torch.arange(blocks, **ints)[None],
        seq_lens=torch.tensor([count], **ints),
        query_start_loc=torch.tensor([0, count], **ints),
        logits_rows=positions[-1:],
    )
    model.forward(torch.tensor(token_ids, device=device), context)
    limit = torch.finfo(dtype).max
    scales = []
    for index, cache in enumerate(model.kv_caches):
        keys, values = (
            part.float().abs().amax((0, 2, 3)) * HEADROOM / limit
            for part in (cache.keys, cache.values)
        )
        if not bool(torch.isfinite(torch.cat((keys, values))).all()):
            raise ModelLoadError(
                f"Layer {index}'s keys or values aren't finite on the sample text."
            )
        scales.append(KVScales(*(torch.where(part > 0, part, 1.0) for part in (keys, values))))
    model.release_kv()
    return scales


def calibrate(
    model: NativeDecoder, tokenizer: Tokenizer | None, max_model_len: int, dtype: torch.dtype
) -> None:
    """Measure the scales of layers that have none in the checkpoint."""
    tokens = sample_tokens(tokenizer, model.spec.vocab_size, min(MAX_SAMPLE_TOKENS, max_model_len))
    measured = measure_kv_scales(model, tokens, dtype)
    stored = model.kv_scales or [None] * len(measured)
    model.kv_scales = [
        stored_scale or measured_scale
        for stored_scale, measured_scale in zip(stored, measured, strict=True)
    ]
