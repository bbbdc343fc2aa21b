"""`generation_config.json`: where a model's output ends and how its makers sample from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import InvalidRequest, ModelLoadError
from engine.sampling_params import SamplingParams
from engine.text.files import read_object

#: Its name there, and ours.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a model folder says about generation.

    Attributes:
        eos_token_ids: ids that end an output; empty where the folder names none.
        sampling: `SamplingParams` fields that differ from its defaults.
    """

    eos_token_ids: list[int] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)


def read_generation_defaults(
    folder: str | Path, tokenizer_eos: int | None = None
) -> GenerationDefaults:
    """Read `generation_config.json`, and `config.json` for what it lacks.

    Args:
        tokenizer_eos: the tokenizer's own EOS id; it comes first in `eos_token_ids`.

    Raises:
        ModelLoadError: naming the file whose values are out of range.
    """
    path = Path(folder) / "generation_config.json"
    values = read_object(path)
    eos = values.get("eos_token_id")
    if eos is None:
        path, config = Path(folder) / "config.json", read_object(Path(folder) / "config.json")
        eos = config.get("eos_token_id")
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    first = [] if tokenizer_eos is None else [tokenizer_eos]
    ids = list(dict.fromkeys([*first, *listed]))
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ModelLoadError(f"{path} has a bad eos_token_id: {eos!r}.", param="model")
    return GenerationDefaults(ids, _sampling(values, Path(folder) / "generation_config.json"))


def _sampling(values: dict[str, Any], path: Path) -> dict[str, Any]:
    """The sampling fields that are set and differ from the defaults, checked."""
    given = {
        ours: values[theirs] for theirs, ours in _SAMPLING.items() if values.get(theirs) is not None
    }
    try:
        params = SamplingParams(**given)
    except InvalidRequest as error:
        raise ModelLoadError(f"{path}: {error.message}", param="model") from error
    plain = SamplingParams()
    return {
        name: getattr(params, name)
        for name in given
        if getattr(params, name) != getattr(plain, name)
    }
