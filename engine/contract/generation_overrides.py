"""`override_generation_config`: what stands in the place of a generation_config.json's values."""

from __future__ import annotations

from typing import Any

from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.sampling_params import SamplingParams

PARAM = "override_generation_config"
#: What it may preset for requests that don't say, as a generation_config.json may.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
#: Token ids that end an output.
_EOS = "eos_token_id"


def check_overrides(given: dict[str, Any]) -> None:
    """Raise `ConfigError` for a name that means nothing here, or a value out of its range."""
    for name, value in given.items():
        if name == _EOS:
            ids = value if isinstance(value, list) else [value]
            if not ids or any(type(each) is not int or each < 0 for each in ids):
                raise ConfigError(f"{PARAM}: {name} must be token ids, got {value!r}.", param=PARAM)
            continue
        if name not in SAMPLING_DEFAULTS:
            known = ", ".join((*SAMPLING_DEFAULTS, _EOS))
            raise ConfigError(f"{PARAM} may hold {known}; got {name!r}.", param=PARAM)
        try:
            SamplingParams(**{name: value})
        except InvalidRequest as error:
            raise ConfigError(f"{PARAM}: {error.message}", param=PARAM) from None
