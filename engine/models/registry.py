"""The architectures of the native decoder, and `ModelRegistry` with those of plug-ins."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

from engine.contract.errors import BadModelConfig, ConfigError, ModelLoadError
from engine.contract.plugins import selected_entry_points
from engine.models.decoder_spec import DecoderSpec
from engine.models.families import (
    gpt,
    layernorm,
    lfm2,
    linear_attention,
    llama,
    mamba,
    mamba2,
    mla,
    moe,
    recurrent_gemma,
    remote_code,
    text_to_text,
    whisper,
)
from engine.models.families.common import ALIASES, Config, Family, SpecBuilder, common_fields
from engine.text.tokenizer_files import parse_object, read_text

_FAMILIES: dict[str, Family] = {
    **llama.LLAMA_FAMILIES,
    **llama.GEMMA_FAMILIES,
    **llama.OLMO_FAMILIES,
    **llama.GLM_FAMILIES,
    **layernorm.FAMILIES,
    **gpt.FAMILIES,
    **moe.FAMILIES,
    **remote_code.REMOTE_CODE_FAMILIES,
    **remote_code.FAMILIES,
    **mamba.FAMILIES,
    **mamba2.FAMILIES,
    **linear_attention.FAMILIES,
    **lfm2.FAMILIES,
    **recurrent_gemma.FAMILIES,
    **mla.FAMILIES,
    **whisper.FAMILIES,
    **text_to_text.FAMILIES,
}
#: Names in checkpoints older than their support in transformers, and the names there.
_SPELLINGS = {
    "AquilaModel": "AquilaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "ChatGLMForConditionalGeneration": "ChatGLMModel",
    "QuantMixtralForCausalLM": "MixtralForCausalLM",
    "StableLMEpochForCausalLM": "StableLmForCausalLM",
}
_FAMILIES |= {spelling: _FAMILIES[name] for spelling, name in _SPELLINGS.items()}
#: Sizes above those of any model. They are limited because lists of layers and experts are built
#: before weights are read, and random weights have these sizes.
_MAX_SIZES = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "num_experts": 1 << 16,
}
#: Names of the same sizes in encoders and in families with experts, in addition to `ALIASES`.
_SIZE_ALIASES = {
    "depth": "num_hidden_layers",
    "encoder_layers": "num_hidden_layers",
    "decoder_layers": "num_hidden_layers",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_experts",
    "moe_num_experts": "num_experts",
    "moe_intermediate_size": "intermediate_size",
}
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
    """Read a model folder's config.json. Raises `ModelLoadError` if it is missing or invalid."""
    path = Path(folder) / "config.json"
    config = parse_object(read_text(path), path)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"{path}: architectures must be a list of names.")
    check_sizes(config, str(path))
    return config


def check_sizes(config: Config, source: str = "config.json") -> None:
    """Raise `BadModelConfig` for a size above those of any model, also in nested configs."""
    for name, value in config.items():
        if isinstance(value, dict):
            check_sizes(value, source)
        max_size = _MAX_SIZES.get(_SIZE_ALIASES.get(name) or ALIASES.get(name, name))
        if max_size is None or not isinstance(value, int | float | str):
            continue
        try:
            is_too_large = not (int(value) if isinstance(value, str) else value) <= max_size
        except ValueError:
            continue  # not a number, which is rejected where it is read
        if is_too_large:
            raise BadModelConfig(
                f"{source}: {name} must be at most {max_size}, got {value!r:.80}.", param=name
            )


def decoder_spec(config: Config) -> DecoderSpec:
    """Read the spec from a config.json. Raises `ModelLoadError` if it isn't supported."""
    names = config.get("architectures") or []
    name = next((name for name in names if name in _FAMILIES), None)
    if name is None:
        supported = ", ".join(native_architectures())
        raise ModelLoadError(
            f"The architecture {', '.join(names) or '(none)'} isn't supported. Known: {supported}."
        )
    family = _FAMILIES[name]
    try:
        completed = family.complete(config)
        spec = DecoderSpec(**{**common_fields(name, completed), **family.build(completed)})
    except KeyError as error:
        reason = f"config.json of {name} lacks {error.args[0]!r}."
        raise ModelLoadError(reason) from error
    except ArithmeticError as error:
        reason = f"config.json of {name} has a number out of range: {error}."
        raise BadModelConfig(reason, param="model") from error
    except (TypeError, ValueError, AttributeError) as error:
        reason = f"config.json of {name} has a value of the wrong type: {error}."
        raise ModelLoadError(reason) from error
    _check(spec)
    return spec


def has_native_decoder(config: Config) -> bool:
    """Return whether the native decoder supports this config.json's architecture."""
    return any(name in _FAMILIES for name in config.get("architectures") or [])


def native_architectures() -> list[str]:
    """Return the architectures of the native decoder, sorted."""
    return sorted(_FAMILIES)


def register_decoder(
    name: str, builder: SpecBuilder, defaults: dict[str, Any] | None = None
) -> None:
    """Register an architecture of the native decoder.

    `builder` maps config.json (aliases resolved, `defaults` filled in) to the spec's fields that
    aren't common to all families.
    """
    _FAMILIES[name] = Family(builder, defaults or {})


def _check(spec: DecoderSpec) -> None:
    """Reject impossible sizes before anything is read or allocated."""
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


# Installed packages with models register entry points, which are read once per process.
#
# - Group `quire.models`: the entry point's name is an architecture, its value
#   "package.module:Class". It is registered by `ModelRegistry.register_model`, and imported when a
#   checkpoint has this architecture.
# - Group `quire.general_plugins`: a function without arguments, which is called before the first
#   model is loaded, and may register anything.
#
# QUIRE_PLUGINS, if set, is a comma-separated list of the plug-ins to load; "" for none.


log = logging.getLogger(__name__)

MODELS = "quire.models"
GENERAL = "quire.general_plugins"
_loaded: set[tuple[str, str, str]] = set()


def load_plugins() -> None:
    """Register and call installed plug-ins that haven't been loaded.

    Raises `ConfigError` if a plug-in fails, since the error of a replica without it would be
    misleading.
    """

    for point in _new_entry_points(MODELS):
        ModelRegistry.register_model(point.name, point.value)
    for point in _new_entry_points(GENERAL):
        try:
            point.load()()
        except Exception as error:
            raise ConfigError(
                f"The plugin {point.name} ({point.value}) failed: {type(error).__name__}: {error}",
                param="QUIRE_PLUGINS",
            ) from error
        log.info("Plugin %s (%s) loaded", point.name, point.value)


def _new_entry_points(group: str) -> list[EntryPoint]:
    """Return the group's entry points that haven't been loaded."""
    points = []
    for point in selected_entry_points(group):
        key = (group, point.name, point.value)
        if key not in _loaded:
            _loaded.add(key)
            points.append(point)
    return points


_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_CONTRACT = ("make_spec", "load", "allocate_kv", "forward", "logits")


class ModelRegistry:
    """Model classes by architecture, registered by plug-ins; they precede built-in families."""

    _classes: ClassVar[dict[str, type | str]] = {}

    @classmethod
    def register_model(cls, architecture: str, model: type | str) -> None:
        """Serve checkpoints whose config.json has `architecture` with `model`.

        Args:
            architecture: a name in config.json's `architectures`.
            model: a class, or "package.module:Class", which is imported when such a checkpoint is
                loaded. It is either a subclass of `transformers.PreTrainedModel` that uses
                `transformers`' attention interface, and runs like other models of `transformers`;
                or a class with the methods of `interface.OutsideModel`.

        An existing architecture is replaced with a warning. Raises `ConfigError` if `model` is
        neither a class nor such a string.
        """
        if not isinstance(architecture, str) or not architecture:
            raise ConfigError(f"An architecture is a name, not {architecture!r}.", param="model")
        if not isinstance(model, type) and not (isinstance(model, str) and _PATH.fullmatch(model)):
            raise ConfigError(
                f'A model is a class or "package.module:Class", not {model!r}.', param="model"
            )
        if cls._classes.get(architecture, model) != model or architecture in native_architectures():
            log.warning("%s is known already; from now on it is %s", architecture, model)
        cls._classes[architecture] = model

    @classmethod
    def unregister_model(cls, architecture: str) -> None:
        """Remove a registered class; unknown names are ignored."""
        cls._classes.pop(architecture, None)

    @classmethod
    def get_registered_archs(cls) -> list[str]:
        """Return the architectures with registered classes."""
        return sorted(cls._classes)

    @classmethod
    def get_supported_archs(cls) -> list[str]:
        """Return the architectures that run natively or by registered classes."""

        return sorted({*native_architectures(), *cls._classes})

    @classmethod
    def find(cls, config: dict[str, Any], methods: Sequence[str] = _CONTRACT) -> type | None:
        """Return the class registered for a config.json after importing it; None for none.

        Args:
            config: a config.json with `architectures`.
            methods: required methods, except for classes of `transformers`.

        Raises `ModelLoadError` if it can't be imported or lacks a method.
        """
        names = config.get("architectures") or []
        name = next((name for name in names if name in cls._classes), None)
        if name is None:
            return None
        registered = cls._classes[name]
        model = _imported(name, registered) if isinstance(registered, str) else registered
        missing = [] if is_transformers(model) else [m for m in methods if not hasattr(model, m)]
        if missing:
            raise ModelLoadError(
                f"{name}: {model.__qualname__} lacks {', '.join(missing)} and is no "
                "transformers.PreTrainedModel."
            )
        return model


def is_transformers(model: type) -> bool:
    """Return whether this is a model class of `transformers`, which runs by the bridge."""
    from transformers import PreTrainedModel

    return issubclass(model, PreTrainedModel)


def _imported(architecture: str, path: str) -> type:
    module, _, name = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(f"{architecture}: {path} can't be imported: {error}") from error
    if not isinstance(target, type):
        raise ModelLoadError(f"{architecture}: {path} is no class.")
    return target
