"""`SpeculativeConfig`: the source of draft tokens. Torch-free; names are vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.checkpoint_options import QUANTIZATIONS
from engine.contract.command_line import JsonSettings, bounded

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


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(JsonSettings):
    """Settings of speculative decoding.

    Attributes:
        method: "ngram", the continuation of the newest tokens' last occurrence in the prompt or the
            output; "suffix", also in earlier outputs of the same tenant; "draft_model", a smaller
            model with the same vocabulary; "medusa" and "mlp_speculator", heads on the model's last
            hidden state; "eagle" and "eagle3", a layer over the hidden states of all tokens; "mtp",
            such a layer of the model's own checkpoint.
        num_speculative_tokens: maximum number of drafts per row and step.
        prompt_lookup_min, prompt_lookup_max: minimum and maximum length of the n-gram to look up.
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

    PARAM = "speculative_config"

    method: str = bounded(dataclasses.MISSING, choices=METHODS)
    num_speculative_tokens: int = bounded(8, low=1, high=64)
    prompt_lookup_min: int = bounded(1, low=1, high=32)
    prompt_lookup_max: int = bounded(4, low=1, high=32)
    suffix_decoding_max_cached_requests: int = bounded(1000, low=0, high=1 << 20)
    disable_by_batch_size: int = bounded(0, low=0, high=1 << 20)
    model: str = ""
    quantization: str | None = bounded(None, choices=QUANTIZATIONS)
    max_model_len: int = bounded(0, low=0, high=1 << 30)
    draft_tensor_parallel_size: int = bounded(1, low=1, high=1)
    acceptance_method: str = bounded("rejection_sampler", choices=ACCEPTANCE)
    posterior_threshold: float = bounded(0.09, low=0.0, high=1.0)
    posterior_alpha: float = bounded(0.3, low=0.0, high=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.computes and not (self.model or self.method == MTP):
            raise self.error(
                f"model must be the folder or hub id of the {self.method.replace('_', ' ')}."
            )
        if self.model and not self.computes:
            raise self.error(f"method={self.method} takes no model, got {self.model!r}.")
        for name in ("posterior_threshold", "posterior_alpha"):
            if not getattr(self, name):
                raise self.error(f"{name} must be above 0.")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise self.error(
                f"prompt_lookup_min ({self.prompt_lookup_min}) must not be above "
                f"prompt_lookup_max ({self.prompt_lookup_max})."
            )

    @property
    def computes(self) -> bool:
        """Whether drafts are computed by weights rather than looked up in text."""
        return self.method == "draft_model" or self.method in HEADS

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
        if "method" not in values:
            raise cls.error(f"method is missing: one of {', '.join(METHODS)}.")
        return super().from_mapping(values)
