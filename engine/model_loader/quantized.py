"""How a checkpoint was quantised, and what the setting `quantization` makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contract.config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.quantization import CHECKPOINT_METHODS, ROUNDED
from engine.models.gguf.folder import source_of
from engine.quantization.checkpoint.format import CheckpointFormat
from engine.quantization.checkpoint.modelopt import quantization_of
from engine.quantization.checkpoint.registry import find_format, told_of
from engine.text.files import parse_object, read_text

#: ModelOpt's own file, which its older checkpoints have instead of `quantization_config`.
MODELOPT_FILE = "hf_quant_config.json"
#: Of the time before `quantization_config`. They don't name the method: it must be asked for.
_OLD_FILES = {
    "awq": ("quant_config.json", "quantize_config.json"),
    "gptq": ("quantize_config.json",),
}
#: Formats whose weights may be floats of 8 bits: "fp8" then names what is there already.
_EIGHT_BIT_FLOATS = ("fp8", "modelopt", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class Quantized:
    """What a checkpoint is, and what becomes of it.

    Attributes:
        form: how its weights were quantised; None: they weren't, or it's a GGUF file.
        rounds: what weights are rounded to while they load; None: nothing.
    """

    form: CheckpointFormat | None
    rounds: str | None


def quantized(folder: Path, raw: dict[str, Any], config: EngineConfig) -> Quantized:
    """Of a model folder and its config.json.

    Raises `ModelLoadError` for a format that isn't read, and `ConfigError` where `quantization`
    names another one than the checkpoint's.
    """
    form = find_format(_told(folder, raw, config.quantization))
    asked = config.quantization
    if asked is None:
        return Quantized(form, None)
    name = _name(form, folder)
    if asked in ROUNDED and not (asked == "fp8" and name in _EIGHT_BIT_FLOATS):
        return Quantized(form, asked)
    if name not in CHECKPOINT_METHODS.get(asked, (asked,)) and asked != "fp8":
        theirs = f"was quantised by {name}" if name else "isn't quantised"
        raise ConfigError(
            f"quantization={asked!r} names a format of checkpoints, but this one {theirs}. Leave "
            "it out to take the checkpoint as it is; int8 and int4 round any.",
            param="quantization",
        )
    return Quantized(form, None)


def _name(form: CheckpointFormat | None, folder: Path) -> str:
    if form is not None:
        return form.name
    return "gguf" if source_of(folder) is not None else ""


def _told(folder: Path, raw: dict[str, Any], asked: str | None) -> Any:
    """What config.json says, or a file beside it."""
    told = told_of(raw)
    if told:
        return told
    path = folder / MODELOPT_FILE
    if path.is_file():
        return quantization_of(parse_object(read_text(path), path), str(path))
    for method in CHECKPOINT_METHODS.get(asked or "", ()):
        for path in (folder / name for name in _OLD_FILES.get(method, ())):
            if path.is_file():
                return {**parse_object(read_text(path), path), "quant_method": method}
    return None
