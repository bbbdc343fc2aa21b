"""`SpeculativeConfig`: the source of draft tokens. Torch-free; names are vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.checkpoint_options import QUANTIZATIONS
from engine.contract.errors import ConfigError

#: The checkpoint's own multi-token prediction layers.
MTP = "mtp"
#: Small networks on the model's hidden states.
HEADS = ("medusa", "mlp_speculator", "eagle", "eagle3", MTP)
METHODS = ("ngram", "suffix", "draft_model", *HEADS)
#: vLLM's older names of `MTP`, by family.
_MTP_ALIASES = frozenset(
    f"{family}_mtp"
    for family in (
        "deepseek", "ernie", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_ocr", "longcat_flash",
        "mimo", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "step3p5",
    )
)  # fmt: skip
#: Acceptance by likelihood, as an alternative to exact rejection sampling.
TYPICAL = "typical_acceptance_sampler"
ACCEPTANCE = ("rejection_sampler", TYPICAL)
_PARAM = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding. Raises `ConfigError` for a value out of range.

    Attributes:
        method: "ngram", the continuation of the newest tokens' last occurrence in the prompt or the
            output; "suffix", also in earlier outputs of the same tenant; "draft_model", a smaller
            model with the same vocabulary; "medusa" and "mlp_speculator", heads on the model's last
            hidden state; "eagle" and "eagle3", a layer over the hidden states of all tokens; "mtp",
            such a layer of the model's own checkpoint.
        num_speculative_tokens: maximum number of drafts per row and step; in [1, 64].
        prompt_lookup_min, prompt_lookup_max: minimum and maximum length of the n-gram to look up;
            in [1, 32].
        suffix_decoding_max_cached_requests: outputs cached for "suffix", over all tenants.
        disable_by_batch_size: no drafts in steps of at least this many sequences; 0: adaptive.
        model: folder or hub id of the draft model or heads; "" with "mtp": the model's own layers.
        quantization: quantizes its weights while they load, as the setting of that name.
        max_model_len: sequences longer than this get no drafts from it; 0: its own context.
        draft_tensor_parallel_size: 1.
        acceptance_method: "rejection_sampler" keeps the model's distribution;
            "typical_acceptance_sampler" also accepts drafts that are likely enough.
        posterior_threshold, posterior_alpha: see `TypicalAcceptanceSampler`; in (0, 1].
    """

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 4
    suffix_decoding_max_cached_requests: int = 1000
    disable_by_batch_size: int = 0
    model: str = ""
    quantization: str | None = None
    max_model_len: int = 0
    draft_tensor_parallel_size: int = 1
    acceptance_method: str = "rejection_sampler"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _config_error(f"method must be one of {', '.join(METHODS)}; got {self.method!r}.")
        self._check_model()
        self._check_acceptance()
        self._check("num_speculative_tokens", 1, 64)
        self._check("prompt_lookup_max", 1, 32)
        self._check("prompt_lookup_min", 1, 32)
        self._check("suffix_decoding_max_cached_requests", 0, 1 << 20)
        self._check("disable_by_batch_size", 0, 1 << 20)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _config_error(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not be above "
                f"prompt_lookup_max ({self.prompt_lookup_max})."
            )

    def _check_model(self) -> None:
        """Check the fields of a draft model or of heads."""
        computes, has_model = self.computes, isinstance(self.model, str) and bool(self.model)
        if (computes and not (has_model or self.method == MTP)) or not isinstance(self.model, str):
            raise _config_error(
                f"model must be the folder or hub id of the {self.method.replace('_', ' ')}."
            )
        if has_model and not computes:
            raise _config_error(f"method={self.method} takes no model, got {self.model!r}.")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise _config_error(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}; got "
                f"{self.quantization!r}."
            )
        self._check("max_model_len", 0, 1 << 30)
        self._check("draft_tensor_parallel_size", 1, 1)

    @property
    def computes(self) -> bool:
        """Whether drafts are computed by weights rather than looked up in text."""
        return self.method == "draft_model" or self.method in HEADS

    def _check_acceptance(self) -> None:
        if self.acceptance_method not in ACCEPTANCE:
            raise _config_error(
                f"acceptance_method must be one of {', '.join(ACCEPTANCE)}; got "
                f"{self.acceptance_method!r}."
            )
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise _config_error(f"{name} must be a number above 0, at most 1; got {value!r}.")

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _config_error(f"{name} must be a whole number in [{low}, {high}], got {value!r}.")

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Self:
        """Build from `speculative_config` as in vLLM: `model: "ngram"` is a method, null a default.

        Raises `ConfigError` for an unknown key.
        """
        values = {key: value for key, value in config.items() if value is not None}
        model = values.get("model")
        if model is not None and "method" not in values:
            named = str(model).strip("[]")
            values["method"] = named if named in ("ngram", "suffix") else "draft_model"
        method = values.get("method")
        if method in ("ngram", "suffix") and str(model).strip("[]") == method:
            del values["model"]
        if isinstance(method, str) and method in _MTP_ALIASES:
            values["method"] = MTP
        names = {spec.name for spec in dataclasses.fields(cls)}
        for key in values:
            if key not in names:
                raise _config_error(f"there is no {key}; there are {', '.join(sorted(names))}.")
        if "method" not in values:
            raise _config_error(f"method is missing: one of {', '.join(METHODS)}.")
        lookup_max = values.get("prompt_lookup_max")
        if isinstance(lookup_max, int) and "prompt_lookup_min" not in values:
            values["prompt_lookup_min"] = min(cls.lookup_min(), lookup_max)
        return cls(**values)

    @classmethod
    def lookup_min(cls) -> int:
        """Return the default of `prompt_lookup_min`."""
        return next(
            int(spec.default)  # type: ignore[arg-type]
            for spec in dataclasses.fields(cls)
            if spec.name == "prompt_lookup_min"
        )


def _config_error(message: str) -> ConfigError:
    return ConfigError(f"{_PARAM}: {message}", param=_PARAM)
