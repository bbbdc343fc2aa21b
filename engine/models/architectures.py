"""From a checkpoint's `config.json` to a `DecoderSpec`: one small function a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.contract.errors import BadModelConfig, ModelLoadError
from engine.models.families import (
    gemma,
    glm,
    gpt,
    latent,
    layernorm,
    llama,
    moe,
    olmo,
    phi3small,
    remote,
    states,
)
from engine.models.families.family import Config, Family, SpecBuilder, common_fields
from engine.models.spec import DecoderSpec
from engine.text.files import parse_object, read_text

_FAMILIES: dict[str, Family] = {
    **llama.FAMILIES,
    **gemma.FAMILIES,
    **olmo.FAMILIES,
    **glm.FAMILIES,
    **layernorm.FAMILIES,
    **gpt.FAMILIES,
    **moe.FAMILIES,
    **remote.FAMILIES,
    **phi3small.FAMILIES,
    **states.FAMILIES,
    **latent.FAMILIES,
}
_MOST_LAYERS = 10_000
_POSITIVE = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


def read_config(folder: str | Path) -> dict[str, Any]:
    """A model folder's config.json. Raises `ModelLoadError` if it's missing or no object."""
    path = Path(folder) / "config.json"
    config = parse_object(read_text(path), path)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{path}: architectures must be a list of names.", param="model")
    for part in (config, config.get("text_config")):
        _check_depth(part if isinstance(part, dict) else {}, path)
    return config


def _check_depth(config: dict[str, Any], path: Path) -> None:
    """Layers are listed, and in the Transformers bridge made, before weights are looked at."""
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        value = config.get(name)
        if isinstance(value, (int, float)) and not value <= _MOST_LAYERS:
            raise BadModelConfig(f"{path}: {name} must be at most {_MOST_LAYERS}.", param=name)


def decoder_spec(config: Config) -> DecoderSpec:
    """The spec of a config.json. Raises `ModelLoadError` for what the native decoder can't run."""
    names = config.get("architectures") or []
    name = next((name for name in names if name in _FAMILIES), None)
    if name is None:
        known = ", ".join(known_architectures())
        raise ModelLoadError(
            f"The architecture {', '.join(names) or '(none)'} isn't supported. Known: {known}.",
            param="model",
        )
    family = _FAMILIES[name]
    try:
        completed = family.complete(config)
        spec = DecoderSpec(**{**common_fields(name, completed), **family.build(completed)})
    except KeyError as error:
        reason = f"config.json of {name} lacks {error.args[0]!r}."
        raise ModelLoadError(reason, param="model") from error
    except ArithmeticError as error:
        reason = f"config.json of {name} has a number out of range: {error}."
        raise BadModelConfig(reason, param="model") from error
    except (TypeError, ValueError, AttributeError) as error:
        reason = f"config.json of {name} has a value of the wrong type: {error}."
        raise ModelLoadError(reason, param="model") from error
    _check(spec)
    return spec


def is_known(config: Config) -> bool:
    """Whether the native decoder has a family for this config.json."""
    return any(name in _FAMILIES for name in config.get("architectures") or [])


def known_architectures() -> list[str]:
    """Names that `config.json` may give as its architecture."""
    return sorted(_FAMILIES)


def register_decoder(
    name: str, builder: SpecBuilder, defaults: dict[str, Any] | None = None
) -> None:
    """Teach the native decoder an architecture.

    `builder` maps config.json (aliases resolved, `defaults` filled in) to the spec's fields that
    aren't common to all families.
    """
    _FAMILIES[name] = Family(builder, defaults or {})


def _check(spec: DecoderSpec) -> None:
    """Sizes that can't be are refused before anything is read or allocated."""
    for field in _POSITIVE:
        if not 1 <= getattr(spec, field) < 1 << 31:
            raise BadModelConfig(
                f"config.json of {spec.architecture}: {field} must be from 1 to 2^31 - 1.",
                param=field,
            )
    if spec.num_heads % spec.num_kv_heads:
        raise ModelLoadError(
            f"config.json of {spec.architecture}: num_attention_heads ({spec.num_heads}) must be a "
            f"multiple of num_key_value_heads ({spec.num_kv_heads}).",
            param="num_key_value_heads",
        )
    if spec.moe is not None and not 0 < spec.moe.top_k <= spec.moe.num_experts:
        raise ModelLoadError(
            f"config.json of {spec.architecture}: num_experts_per_tok must be from 1 to "
            f"{spec.moe.num_experts}.",
            param="num_experts_per_tok",
        )
