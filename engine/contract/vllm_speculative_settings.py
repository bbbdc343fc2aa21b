"""vLLM's settings of drafts, which are keys of `speculative_config` here. See `vllm_settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.contract.errors import ConfigError
from engine.contract.foreign import Foreign, Kind

_OURS = "speculative_config"


def _drafts(name: str, kind: Kind, key: str, *, usual: Any = None, **more: Any) -> Foreign:
    """One of the manual's flags that became a key of `speculative_config`. `usual`: its default,
    which asks for no drafts.
    """

    def becomes(value: Any) -> dict[str, Any]:
        return {_OURS: {key: value}} if value and value != usual else {}

    return Foreign(name, kind, f"`{_OURS}`, `{key}`", becomes=becomes, **more)


#: In the order of vLLM's manual.
OF_THE_MANUAL: tuple[Foreign, ...] = (
    _drafts("speculative_model", str, "model"),
    _drafts("num_speculative_tokens", int, "num_speculative_tokens"),
    _drafts("speculative_model_quantization", str, "quantization"),
    _drafts(
        "speculative_draft_tensor_parallel_size",
        int,
        "draft_tensor_parallel_size",
        usual=1,
        short=("-spec-draft-tp",),
    ),
    _drafts("speculative_max_model_len", int, "max_model_len"),
    _drafts("speculative_disable_by_batch_size", int, "disable_by_batch_size"),
    _drafts("ngram_prompt_lookup_max", int, "prompt_lookup_max"),
    _drafts("ngram_prompt_lookup_min", int, "prompt_lookup_min"),
    _drafts("spec_decoding_acceptance_method", str, "acceptance_method", usual="rejection_sampler"),
    _drafts(
        "typical_acceptance_sampler_posterior_threshold", float, "posterior_threshold", usual=0.09
    ),
    _drafts("typical_acceptance_sampler_posterior_alpha", float, "posterior_alpha", usual=0.3),
)

OF_LATER_RELEASES: tuple[Foreign, ...] = (
    _drafts("spec_method", str, "method"),
    _drafts("spec_model", str, "model"),
    _drafts("spec_tokens", int, "num_speculative_tokens"),
)


def check_source(derived: Mapping[str, Any], first_given: Mapping[str, str]) -> None:
    """Raise `ConfigError` where such settings don't say where drafts come from.

    `derived`: settings of ours that vLLM's became; `first_given`: of which each came first.
    """
    given = first_given.get(_OURS)
    if given is not None and not {"model", "method"} & derived[_OURS].keys():
        raise ConfigError(
            f"{given} needs speculative_model, which says where drafts come from.", param=given
        )
