"""`SpeculativeConfig`: where drafts come from. Torch-free. Names are vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.contract.errors import ConfigError

METHODS = ("ngram", "suffix")
#: vLLM's methods that need weights of their own.
_WITH_WEIGHTS = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "mtp")
_PARAM = "speculative_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Raises `ConfigError` for a value out of its range.

    Attributes:
        method: "ngram", what followed the last time the newest tokens stood in the prompt or the
            output; "suffix", the same in earlier outputs of the same tenant too.
        num_speculative_tokens: most drafts of a row in a step; in [1, 64].
        prompt_lookup_min, prompt_lookup_max: how many of the newest tokens must stand there, and at
            how many the search begins; in [1, 32].
        suffix_decoding_max_cached_requests: outputs that are kept for "suffix", over all tenants.
        disable_by_batch_size: no drafts in steps of at least so many sequences; 0: as it pays.
    """

    method: str
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_decoding_max_cached_requests: int = 1000
    disable_by_batch_size: int = 0

    def __post_init__(self) -> None:
        if self.method in _WITH_WEIGHTS:
            raise _refused(
                f"method={self.method} needs a draft model, which can't be loaded yet: take "
                f"{' or '.join(METHODS)}."
            )
        if self.method not in METHODS:
            raise _refused(f"method must be one of {', '.join(METHODS)}; got {self.method!r}.")
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

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _refused(f"{name} must be a whole number in [{low}, {high}], got {value!r}.")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """From `speculative_config`; `model: "ngram"` says the method, as in vLLM.

        Raises `ConfigError` for an unknown key.
        """
        values = dict(given)
        model = values.pop("model", None)
        if model is not None and "method" not in values:
            values["method"] = str(model).strip("[]")
            if values["method"] not in METHODS:
                values["method"] = "draft_model"
        known = {spec.name for spec in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise _refused(f"there is no {key}; there are {', '.join(sorted(known))}.")
        if "method" not in values:
            raise _refused(f"method is missing: one of {', '.join(METHODS)}.")
        if "prompt_lookup_max" in values and "prompt_lookup_min" not in values:
            values["prompt_lookup_min"] = min(cls.lookup_min(), values["prompt_lookup_max"])
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
