"""Loads a model of `transformers` as a `TransformersModel`."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from engine.checkpoints.quantized_weights import dequantized_tensors
from engine.checkpoints.safetensors import check_dummy_size
from engine.checkpoints.torch_files import lacks_safetensors, read_pt
from engine.contract.errors import ModelLoadError
from engine.models.registry import native_architectures
from engine.models.rotary_embedding import RopeSpec, rope_spec
from engine.models.vision.registry import VISION_FAMILIES
from engine.quantization.formats.base import CheckpointFormat
from engine.quantization.packing import QuantScheme
from engine.transformers_backend.attention import (
    EXPLORED,
    PAGED,
    PagedLayer,
    register,
    unknown_layers,
    use_attention,
    use_handler,
)
from engine.transformers_backend.linear import pack
from engine.transformers_backend.model import TransformersModel, TransformersSpec
from engine.transformers_backend.ranks import RankPlan
from engine.transformers_backend.verify import AttentionProbe, UnsupportedAttention, verify_parity
from engine.transformers_backend.vision import TransformersVisionModel, verify_pictures
from kernels import KernelSet
from kernels.interface import RankGroup

log = logging.getLogger(__name__)

#: The context length if config.json has none: state-space models have no inherent limit.
DEFAULT_LENGTH = 2048
_LENGTHS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
#: Exceptions that `transformers` raises for an invalid folder.
_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ImportError,
    AssertionError,  # torch's, for an invalid padding index
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


class Source:
    """A model folder, optionally with an external class.

    Args:
        folder: with config.json and weights.
        raw: config.json with the engine's settings applied.
        trust_remote_code: run the folder's code.
        outside: a registered `PreTrainedModel` class; by default that of `transformers`.
        dummy: make random weights instead of reading them.
        form: the checkpoint's quantization format, or None. `transformers` gets dequantized
        weights.

    Raises `ModelLoadError` if `transformers` has no causal language model for it.
    """

    def __init__(
        self,
        folder: Path,
        raw: dict[str, Any],
        trust_remote_code: bool = False,
        outside: Any = None,
        dummy: bool = False,
        form: CheckpointFormat | None = None,
    ) -> None:
        self.folder, self.trust, self.dummy, self._form = folder, trust_remote_code, dummy, form
        raw = {name: value for name, value in raw.items() if name != "quantization_config"}
        self._maker: Any = AutoModelForCausalLM if outside is None else outside
        #: Whether prompts may contain pictures.
        self.sees = False
        #: For messages: how the text part of a multimodal model can be loaded; "" if it has none.
        self.text_part = ""
        self.config: PreTrainedConfig = self._config(raw, outside)
        if outside is None:
            self._check()
        if getattr(self.config, "is_encoder_decoder", False):
            raise ModelLoadError(
                f"{self._name} is an encoder and a decoder; of such models the engine runs native "
                "ones alone."
            )

    def _config(self, raw: dict[str, Any], outside: Any) -> PreTrainedConfig:
        code = raw.get("auto_map") and not self.trust and outside is None
        if code and raw.get("model_type") not in CONFIG_MAPPING:
            raise ModelLoadError(
                f"The architecture {_names(raw)} isn't supported. {self.folder} brings code of its "
                "own, which runs only with trust_remote_code.",
                param="trust_remote_code",
            )
        try:
            if outside is not None:
                return outside.config_class.from_dict(raw)
            read = AutoConfig.from_pretrained(
                self.folder, trust_remote_code=self.trust, local_files_only=True
            )
            return type(read).from_dict(_decoded(raw))
        except _FAILURES as error:
            raise ModelLoadError(
                f"The architecture {_names(raw)} isn't supported: transformers "
                f"{transformers.__version__} can't read its config.json: {error}"
            ) from error

    def _check(self) -> None:
        """Raise `ModelLoadError` if there is no causal language model."""
        remote = "AutoModelForCausalLM" in (getattr(self.config, "auto_map", None) or {})
        if remote and self.trust:
            return
        text_class = _class_name(AutoModelForCausalLM, self.config)
        image_class = _class_name(AutoModelForImageTextToText, self.config)
        media_class = image_class or _class_name(AutoModelForMultimodalLM, self.config)
        has_text_class = text_class not in ("", media_class)
        if media_class and not (has_text_class and text_class in (self.config.architectures or [])):
            if not has_text_class:
                text_class = self._name.replace("ForConditionalGeneration", "ForCausalLM")
            if has_text_class or text_class in native_architectures():
                override = f"""--hf-overrides '{{"architectures": ["{text_class}"]}}'"""
                self.text_part = f" {override} loads its text part."
            if image_class:
                self._maker, self.sees = AutoModelForImageTextToText, True
                return
            families = ", ".join(name.partition("For")[0] for name in VISION_FAMILIES)
            raise ModelLoadError(
                f"The architecture {self._name} isn't supported by the Transformers bridge: it "
                "takes images or sound. Models that do must be "
                f"of a native family: {families}.{self.text_part}"
            )
        if text_class:
            return
        raise ModelLoadError(
            f"The architecture {self._name} isn't supported: transformers "
            f"{transformers.__version__} has no causal language model of that type."
        )

    @property
    def _name(self) -> str:
        return ", ".join(self.config.architectures or [self.config.model_type])

    @property
    def rotates(self) -> bool:
        """Whether its config has settings for rotary embedding."""
        text = self.config.get_text_config(decoder=True)
        return getattr(text, "rope_parameters", None) is not None

    def spec(self, max_model_len: int | None) -> TransformersSpec:
        """Return the spec as far as config.json determines it; exploring the model completes it.

        max_model_len: the requested context length, used by models without a limit.
        """
        config = self.config
        text = config.get_text_config(decoder=True)
        lengths = (getattr(text, name, None) for name in _LENGTHS)
        length = next((n for n in lengths if isinstance(n, int) and n > 0), None)
        eos = getattr(text, "eos_token_id", None)
        eos = getattr(config, "eos_token_id", None) if eos is None else eos
        return TransformersSpec(
            architecture=self._name,
            vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            max_position_embeddings=length or max_model_len or DEFAULT_LENGTH,
            rope=_rope(text),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            bos_token_id=getattr(text, "bos_token_id", None),
            dtype=str(config.dtype or text.dtype or "float32"),
        )

    def model(self, dtype: torch.dtype) -> nn.Module:
        """Load the model with its weights, in evaluation mode."""
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if self.dummy:
                    return self._random(options)
                maker, folder = self._maker, str(self.folder)
                if self._form is not None:
                    maker, folder = self._class(), ""
                    options["state_dict"] = dequantized_tensors(self.folder, self._form, dtype)
                elif lacks_safetensors(self.folder):
                    maker, folder = self._class(), ""
                    options["state_dict"] = dict(read_pt(self.folder).tensors())
                model, info = maker.from_pretrained(
                    folder or None,
                    config=self.config,
                    trust_remote_code=self.trust,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    **options,
                )
            except _FAILURES as error:
                raise ModelLoadError(
                    f"{self.folder}: transformers can't load it: {error}"
                ) from error
        self._check_read(info)
        loaded: nn.Module = model.eval()
        return loaded

    def _class(self) -> Any:
        """Return the model's class, to be loaded from tensors instead of a folder."""
        if self._maker not in (AutoModelForCausalLM, AutoModelForImageTextToText):
            return self._maker
        mapping = self._maker._model_mapping
        if type(self.config) not in mapping:
            raise ModelLoadError(
                f"{self.folder} brings code of its own, for which quantized checkpoints aren't "
                "read: take the plain one."
            )
        return mapping[type(self.config)]

    def _random(self, options: dict[str, Any]) -> nn.Module:
        make = getattr(self._maker, "from_config", None) or self._maker._from_config
        with torch.device("meta"):
            shapes = make(self.config, **options)
        text = self.config.get_text_config(decoder=True)
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
        sizes = {name: getattr(text, name) for name in names if hasattr(text, name)}
        num_bytes = sum(parameter.nbytes for parameter in shapes.parameters())
        check_dummy_size(self._name, sizes, num_bytes)
        model: nn.Module = make(self.config, **options)
        return model.eval()

    def _check_read(self, info: dict[str, Any]) -> None:
        """Raise `ModelLoadError` for missing tensors, which would have random values."""
        for kind in ("missing_keys", "mismatched_keys"):
            if info.get(kind):
                some = ", ".join(sorted(str(key) for key in info[kind])[:5])
                raise ModelLoadError(
                    f"{self.folder}: the checkpoint's {kind.replace('_', ' ')}: {some}."
                )
        if unread := sorted(info.get("unexpected_keys") or ()):
            log.warning("%d tensors of the checkpoint weren't used: %s", len(unread), unread[:5])


def _class_name(auto_class: Any, config: PreTrainedConfig) -> str:
    mapping = auto_class._model_mapping
    return mapping[type(config)].__name__ if type(config) in mapping else ""


def _names(raw: dict[str, Any]) -> str:
    return ", ".join(raw.get("architectures") or []) or "(none)"


def _decoded(value: Any) -> Any:
    """Decode JSON as `transformers` writes it, with infinities as objects."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _decoded(inner) for name, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _rope(config: PreTrainedConfig) -> RopeSpec | None:
    """Return the rope scaling that extends the context, if it is a known one."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_type"), str):
        return None
    try:
        return rope_spec({**config.to_dict(), "rope_parameters": rope}, 2)
    except ModelLoadError:
        return None


_EXPLORED_TOKENS = 8
_CHOOSING = ("sparse", "indexed", "compressed")
#: Exceptions that a model raises when it is called in an unexpected way.
_BUILD_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)


def load_bridge(
    source: Source,
    spec: TransformersSpec,
    ops: KernelSet,
    dtype: torch.dtype,
    max_model_len: int,
    progress: Callable[[int, int], None],
    scheme: QuantScheme = QuantScheme(),  # noqa: B008
    ranks: RankGroup | None = None,
) -> TransformersModel:
    """Load, explore and verify a model, or this rank's share.

    Raises `ModelLoadError` with the reason if it can't use the paged cache, `ConfigError` if ranks
    can't share it.
    """
    register()
    progress(0, 2)
    model = source.model(dtype)
    progress(1, 2)
    plan = None if ranks is None else RankPlan(model, ranks)
    try:
        kind = TransformersVisionModel if source.sees else TransformersModel
        bridged = bridge(model, spec, ops, max_model_len, scheme, kind, plan)
        if isinstance(bridged, TransformersVisionModel):
            verify_pictures(bridged, source.folder)
    except UnsupportedAttention as error:
        raise ModelLoadError(
            f"{type(model).__name__} can't run over the paged KV cache: {error}.{source.text_part}"
        ) from error
    except _BUILD_FAILURES as error:
        raise ModelLoadError(
            f"{type(model).__name__} can't run over the paged KV cache: its forward pass fails: "
            f"{type(error).__name__}: {error}"
        ) from error
    if ranks is not None:
        bridged.join_ranks()
    progress(2, 2)
    return bridged


def bridge(
    model: nn.Module,
    spec: TransformersSpec,
    ops: KernelSet,
    max_model_len: int,
    scheme: QuantScheme = QuantScheme(),  # noqa: B008
    kind: type[TransformersModel] = TransformersModel,
    plan: RankPlan | None = None,
) -> TransformersModel:
    """Make a model use the paged attention kernels.

    Raises `UnsupportedAttention`, and whatever an incompatible model raises.
    """
    num_parameters = sum(tensor.numel() for tensor in model.parameters())
    decode_bytes = pack(model, ops, scheme, plan)
    _freeze_rope(model, max_model_len)
    bridged = kind(model, spec, ops, decode_bytes)
    bridged.stateful = _is_stateful(bridged)
    bridged.layers, state_size = _explore(bridged, max_model_len)
    bridged.spec = _completed(bridged, num_parameters, state_size)
    use_attention(model, PAGED)
    verify_parity(bridged)
    bridged.adapted.settle()
    return bridged


def without_windows(bridged: TransformersModel) -> None:
    """Disable the sliding windows of all layers."""
    for layer in bridged.layers:
        layer.window = 0
    bridged.spec = dataclasses.replace(
        bridged.spec, sliding_windows=(0,) * len(bridged.spec.sliding_windows)
    )


def _is_stateful(bridged: TransformersModel) -> bool:
    """Whether sequences have a state. Raises `UnsupportedAttention` for unsupported kinds."""
    for kind in getattr(bridged.model.config, "layer_types", None) or ():
        # Over a few tokens they select all of them, so that exploring wouldn't show it.
        if any(word in kind for word in _CHOOSING):
            raise UnsupportedAttention(f"its {kind} layers choose the tokens that they attend to")
    declared = bool(getattr(bridged.model, "_is_stateful", False))
    cache = bridged.new_cache()
    if unknown := unknown_layers(cache):
        kinds = ", ".join(sorted(unknown))
        raise UnsupportedAttention(f"it keeps {kinds} beside keys and values")
    stateful = any(True for _ in cache.linear_layers)
    if declared and not (stateful and bridged.cache_argument):
        raise UnsupportedAttention("it keeps its state in a way of its own")
    return stateful


@torch.inference_mode()
def _explore(bridged: TransformersModel, max_model_len: int) -> tuple[list[PagedLayer], int]:
    """Return the attention calls of a pass over a few tokens, and the size of its state."""
    model, run = bridged.model, AttentionProbe(max_model_len)
    use_attention(model, EXPLORED)
    ids = torch.arange(_EXPLORED_TOKENS)[None]
    arguments: dict[str, Any] = {"input_ids": ids, "use_cache": bridged.stateful}
    cache = bridged.new_cache()
    if bridged.stateful:
        arguments[bridged.cache_argument] = cache
    with use_handler(run):
        model(**arguments)
    if not run.layers and not bridged.stateful:
        raise UnsupportedAttention(
            "its attention doesn't go through transformers' attention interface"
        )
    return run.layers, cache.num_elements


def _completed(
    bridged: TransformersModel, num_parameters: int, state_size: int
) -> TransformersSpec:
    """Return the spec completed with the results of exploring."""
    layers = bridged.layers
    shapes = {(layer.num_kv_heads, layer.size) for layer in layers}
    return dataclasses.replace(
        bridged.spec,
        architecture=type(bridged.model).__name__,
        num_layers=len(layers),
        kv_sizes=tuple(2 * layer.num_kv_heads * layer.size for layer in layers),
        sliding_windows=tuple(layer.window for layer in layers) if len(shapes) == 1 else (),
        state_size=state_size,
        num_parameters=num_parameters,
    )


def _freeze_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix scalings that depend on the longest position, because cached keys must not change."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _moves(kinds):
            _at_end(module, max_model_len)
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for name, kind in kinds.items():
                if _moves(kind):
                    _at_end(module, max_model_len, layer_type=name)
                    kinds[name] = "default"


def _moves(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _at_end(module: nn.Module, max_model_len: int, **arguments: str) -> None:
    with torch.no_grad():
        module(torch.zeros(1), torch.tensor([[max_model_len - 1]]), **arguments)
