"""Where a bridged model comes from: config.json and weights of a folder, read by `transformers`."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine.contract.errors import ModelLoadError
from engine.layers.rotary import RopeSpec, rope_spec
from engine.models.bridge.spec import BridgeSpec
from engine.models.quantized_weights import plain_tensors
from engine.quantization.checkpoint.format import CheckpointFormat

log = logging.getLogger(__name__)

#: The context of a model whose config names none: a state-space model has no limit of its own.
DEFAULT_LENGTH = 2048
_LENGTHS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
#: What `transformers` raises for a folder that it can't make sense of.
_FAILURES = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    ImportError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)


class Source:
    """A model folder, or a class from outside and its folder.

    Args:
        folder: with config.json and safetensors.
        raw: config.json with the engine's settings applied.
        trust_remote_code: run the code that the folder brings.
        outside: a registered `PreTrainedModel` class; by default `transformers`' own.
        dummy: make random weights instead of reading any.
        form: how the checkpoint was quantised; None: it wasn't. `transformers` then gets the
            weights as plain ones.

    Raises `ModelLoadError` for a model that `transformers` has no causal language model for.
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
        self.config: PreTrainedConfig = self._config(raw, outside)
        if outside is None:
            self._check()
        if getattr(self.config, "is_encoder_decoder", False):
            raise ModelLoadError(
                f"{self._name} is an encoder and a decoder; the engine runs decoders alone.",
                param="model",
            )

    def _config(self, raw: dict[str, Any], outside: Any) -> PreTrainedConfig:
        """config.json as `transformers` reads it."""
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
                f"{transformers.__version__} can't read its config.json: {error}",
                param="model",
            ) from error

    def _check(self) -> None:
        """Refuse what has no causal language model."""
        known = type(self.config) in AutoModelForCausalLM._model_mapping
        remote = "AutoModelForCausalLM" in (getattr(self.config, "auto_map", None) or {})
        if not known and not (remote and self.trust):
            raise ModelLoadError(
                f"The architecture {self._name} isn't supported: transformers "
                f"{transformers.__version__} has no causal language model of that type.",
                param="model",
            )

    @property
    def _name(self) -> str:
        return ", ".join(self.config.architectures or [self.config.model_type])

    @property
    def rotates(self) -> bool:
        """Whether its config has a place for rotary embedding's settings."""
        text = self.config.get_text_config(decoder=True)
        return getattr(text, "rope_parameters", None) is not None

    def spec(self, max_model_len: int | None) -> BridgeSpec:
        """What config.json tells; the rest comes from exploring the model.

        max_model_len: the wanted context, which a model without a limit of its own takes.
        """
        config = self.config
        text = config.get_text_config(decoder=True)
        lengths = (getattr(text, name, None) for name in _LENGTHS)
        length = next((n for n in lengths if isinstance(n, int) and n > 0), None)
        eos = text.eos_token_id if text.eos_token_id is not None else config.eos_token_id
        return BridgeSpec(
            architecture=self._name,
            vocab_size=int(text.vocab_size),
            hidden_size=int(text.hidden_size),
            max_position_embeddings=length or max_model_len or DEFAULT_LENGTH,
            rope=_rope(text),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            bos_token_id=text.bos_token_id,
            dtype=str(config.dtype or text.dtype or "float32"),
        )

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The model with its weights, in evaluation mode."""
        options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                if self.dummy:
                    return self._random(options)
                maker, folder = self._maker, str(self.folder)
                if self._form is not None:
                    maker, folder = self._class(), ""
                    options["state_dict"] = plain_tensors(self.folder, self._form, dtype)
                model, found = maker.from_pretrained(
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
                    f"{self.folder}: transformers can't load it: {error}", param="model"
                ) from error
        self._check_read(found)
        made: nn.Module = model.eval()
        return made

    def _class(self) -> Any:
        """The model's own class, which takes tensors instead of a folder."""
        if self._maker is not AutoModelForCausalLM:
            return self._maker
        mapping = AutoModelForCausalLM._model_mapping
        if type(self.config) not in mapping:
            raise ModelLoadError(
                f"{self.folder} brings code of its own, for which quantised checkpoints aren't "
                "read: take the plain one.",
                param="model",
            )
        return mapping[type(self.config)]

    def _random(self, options: dict[str, Any]) -> nn.Module:
        make = getattr(self._maker, "from_config", None) or self._maker._from_config
        model: nn.Module = make(self.config, **options)
        return model.eval()

    def _check_read(self, found: dict[str, Any]) -> None:
        """A tensor that the checkpoint lacks would be random."""
        for kind in ("missing_keys", "mismatched_keys"):
            if found.get(kind):
                some = ", ".join(sorted(str(key) for key in found[kind])[:5])
                raise ModelLoadError(
                    f"{self.folder}: the checkpoint's {kind.replace('_', ' ')}: {some}.",
                    param="model",
                )
        if unread := sorted(found.get("unexpected_keys") or ()):
            log.warning("%d tensors of the checkpoint weren't used: %s", len(unread), unread[:5])


def _names(raw: dict[str, Any]) -> str:
    return ", ".join(raw.get("architectures") or []) or "(none)"


def _decoded(value: Any) -> Any:
    """JSON as `transformers` writes it: infinities are objects there."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _decoded(inner) for name, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value


def _rope(config: PreTrainedConfig) -> RopeSpec | None:
    """The scaling that stretches the context, where it's one that we know."""
    found = getattr(config, "rope_parameters", None)
    if not isinstance(found, dict) or not isinstance(found.get("rope_type"), str):
        return None
    try:
        return rope_spec({**config.to_dict(), "rope_parameters": found}, 2)
    except ModelLoadError:
        return None
