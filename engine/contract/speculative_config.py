"""`SpeculativeConfig`: where drafts come from. Torch-free. Names are vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.checkpoint_options import QUANTIZATIONS
from engine.contract.errors import ConfigError

#: The checkpoint's own layers for drafts (multi-token prediction).
OWN_LAYERS = "mtp"
#: Small networks on the model's hidden states.
HEADS = ("medusa", "mlp_speculator", "eagle", "eagle3", OWN_LAYERS)
METHODS = ("ngram", "suffix", "draft_model", *HEADS)
#: vLLM's older names of `OWN_LAYERS`, by family.
_OLDER = frozenset(
    f"{family}_mtp"
    for family in (
        "deepseek", "ernie", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_ocr", "longcat_flash",
        "mimo", "nemotron_h", "pangu_ultra_moe", "qwen3_5", "qwen3_next", "step3p5",
    )
)  # fmt: skip
#: Acceptance by likelihood, beside the exact one.
TYPICAL = "typical_acceptance_sampler"
ACCEPTANCE = ("rejection_sampler", TYPICAL)
_PARAM = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Raises `ConfigError` for a value out of its range.

    Attributes:
        method: "ngram", what followed the last time the newest tokens stood in the prompt or the
            output; "suffix", the same in earlier outputs of the same tenant too; "draft_model",
            what a smaller model with the same vocabulary says; "medusa" and "mlp_speculator", what
            heads on the model's last hidden state say; "eagle" and "eagle3", what a layer over
            those of all tokens says; "mtp", such a layer of the model's own checkpoint.
        num_speculative_tokens: most drafts of a row in a step; in [1, 64].
        prompt_lookup_min, prompt_lookup_max: how many of the newest tokens must stand there, and at
            how many the search begins; in [1, 32].
        suffix_decoding_max_cached_requests: outputs that are kept for "suffix", over all tenants.
        disable_by_batch_size: no drafts in steps of at least so many sequences; 0: as it pays.
        model: folder or hub id of the draft model, or of the heads; with "mtp" "": the model's own.
        quantization: rounds its weights while they load, as the setting of that name.
        max_model_len: sequences longer than this get no drafts from it; 0: its own context.
        draft_tensor_parallel_size: 1.
        acceptance_method: "rejection_sampler", a draft holds if the model draws it itself, so that
            nothing changes; "typical_acceptance_sampler", also if it is likely enough.
        posterior_threshold, posterior_alpha: for that: see `TypicalAcceptanceSampler`; above 0, at
        most 1.
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
            raise _refused(f"method must be one of {', '.join(METHODS)}; got {self.method!r}.")
        self._check_model()
        self._check_acceptance()
        self._check("num_speculative_tokens", 1, 64)
        self._check("prompt_lookup_max", 1, 32)
        self._check("prompt_lookup_min", 1, 32)
        self._check("suffix_decoding_max_cached_requests", 0, 1 << 20)
        self._check("disable_by_batch_size", 0, 1 << 20)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _refused(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not be above "
                f"prompt_lookup_max ({self.prompt_lookup_max})."
            )

    def _check_model(self) -> None:
        """What only means something with a draft model, or heads."""
        takes, named = self.computes, isinstance(self.model, str) and bool(self.model)
        if (takes and not (named or self.method == OWN_LAYERS)) or not isinstance(self.model, str):
            raise _refused(
                f"model must be the folder or hub id of the {self.method.replace('_', ' ')}."
            )
        if named and not takes:
            raise _refused(f"method={self.method} takes no model, got {self.model!r}.")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise _refused(
                f"quantization must be one of {', '.join(QUANTIZATIONS)}; got "
                f"{self.quantization!r}."
            )
        self._check("max_model_len", 0, 1 << 30)
        self._check("draft_tensor_parallel_size", 1, 1)

    @property
    def computes(self) -> bool:
        """Whether drafts come from weights, and not from text."""
        return self.method == "draft_model" or self.method in HEADS

    def _check_acceptance(self) -> None:
        if self.acceptance_method not in ACCEPTANCE:
            raise _refused(
                f"acceptance_method must be one of {', '.join(ACCEPTANCE)}; got "
                f"{self.acceptance_method!r}."
            )
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise _refused(f"{name} must be a number above 0, at most 1; got {value!r}.")

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _refused(f"{name} must be a whole number in [{low}, {high}], got {value!r}.")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From `speculative_config`, as in vLLM: `model: "ngram"` is a method, null a default.

        Raises `ConfigError` for an unknown key.
        """
        values = {key: value for key, value in given.items() if value is not None}
        model = values.get("model")
        if model is not None and "method" not in values:
            named = str(model).strip("[]")
            values["method"] = named if named in ("ngram", "suffix") else "draft_model"
        method = values.get("method")
        if method in ("ngram", "suffix") and str(model).strip("[]") == method:
            del values["model"]
        if isinstance(method, str) and method in _OLDER:
            values["method"] = OWN_LAYERS
        known = {spec.name for spec in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise _refused(f"there is no {key}; there are {', '.join(sorted(known))}.")
        if "method" not in values:
            raise _refused(f"method is missing: one of {', '.join(METHODS)}.")
        longest = values.get("prompt_lookup_max")
        if isinstance(longest, int) and "prompt_lookup_min" not in values:
            values["prompt_lookup_min"] = min(cls.lookup_min(), longest)
        return cls(**values)

    @classmethod
    def lookup_min(cls) -> int:
        """`prompt_lookup_min` by default."""
        return next(
            int(spec.default)  # type: ignore[arg-type]
            for spec in dataclasses.fields(cls)
            if spec.name == "prompt_lookup_min"
        )


def _refused(message: str) -> ConfigError:
    return ConfigError(f"{_PARAM}: {message}", param=_PARAM)


def check_speculative(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a `speculative_config` that can't be used; {}: there is none."""
    if given:
        SpeculativeConfig.from_mapping(given)
