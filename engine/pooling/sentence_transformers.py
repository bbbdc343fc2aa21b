"""The files that sentence-transformers writes beside a model: modules, pooling, prompts.

A model is a list of modules (modules.json): the transformer, a pooling, maybe dense layers, maybe
a normalization. Weights of dense layers are read by `engine.pooling.heads`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.contract.errors import ModelLoadError
from engine.text.tokenizer_files import read_object, read_text

_POOLING_FLAGS = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_lasttoken": "LAST",
    "pooling_mode_mean_tokens": "MEAN",
}
_POOLING_NAMES = {"cls": "CLS", "lasttoken": "LAST", "mean": "MEAN"}
_ACTIVATIONS = {"Tanh": "tanh", "Identity": "", "ReLU": "relu", "GELU": "gelu"}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A dense layer after the pooling: sizes in elements, `activation` "" for none."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """The settings in the files; all are empty for a folder without them.

    Attributes:
        pooling_type: "CLS", "LAST" or "MEAN"; "" without modules.json.
        normalize: whether the last module normalizes.
        dense: dense layers between pooling and normalization.
        max_seq_length: longest prompt, or None.
        prompt: text put before everything that is embedded (`default_prompt_name`).
        similarity: of two vectors, as named in config_sentence_transformers.json.
    """

    pooling_type: str = ""
    normalize: bool = False
    dense: tuple[DenseModule, ...] = ()
    max_seq_length: int | None = None
    prompt: str = ""
    similarity: str = "cosine"
    prompts: dict[str, str] = field(default_factory=dict)


def read_sentence_files(folder: Path) -> SentenceFiles:
    """Read the files of a model folder. Raises `ModelLoadError` naming an unsupported module."""
    path = folder / "modules.json"
    if not path.is_file():
        return SentenceFiles()
    pooling_type, normalize, dense, excludes_prompt = "", False, [], None
    for module in _modules(path):
        kind = str(module.get("type", "")).rsplit(".", 1)[-1]
        module_folder = _inside(folder, str(module.get("path", "")), path)
        if kind == "Pooling":
            pooling_path = module_folder / "config.json"
            pooling_type = _pooling_type(pooling_path)
            if read_object(pooling_path).get("include_prompt") is False:
                excludes_prompt = pooling_path
        elif kind == "Dense":
            if normalize:
                raise ModelLoadError(f"{path}: a Dense layer after Normalize isn't supported.")
            dense.append(_dense(module_folder))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise ModelLoadError(f"{path}: the module {kind!r} isn't supported.")
    if not pooling_type:
        return SentenceFiles()
    files = _with_settings(folder, pooling_type, normalize, tuple(dense))
    if excludes_prompt is not None and files.prompts:
        raise ModelLoadError(
            f"{excludes_prompt}: include_prompt must be true; pooling a text without its prompt "
            "isn't supported.",
            param="include_prompt",
        )
    return files


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} isn't valid JSON: {error}.") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path} must hold a list of objects.")
    return modules


def _with_settings(
    folder: Path, pooling_type: str, normalize: bool, dense: tuple[DenseModule, ...]
) -> SentenceFiles:
    """Add settings from sentence_bert_config.json and config_sentence_transformers.json."""
    config_path = folder / "config_sentence_transformers.json"
    config = read_object(config_path)
    if config.get("truncate_dim") is not None:
        raise ModelLoadError(
            f"{config_path}: truncate_dim isn't supported; remove it, and ask for `dimensions`."
        )
    prompts = {str(k): str(v) for k, v in (config.get("prompts") or {}).items() if v}
    return SentenceFiles(
        pooling_type=pooling_type,
        normalize=normalize,
        dense=dense,
        max_seq_length=_max_seq_length(folder),
        prompt=prompts.get(str(config.get("default_prompt_name")), ""),
        similarity=str(config.get("similarity_fn_name") or "cosine"),
        prompts=prompts,
    )


def _max_seq_length(folder: Path) -> int | None:
    """Return the maximum prompt length in tokens; None if it isn't limited.

    Since version 5.4 it is in the tokenizer's settings.
    """
    path, name = folder / "sentence_bert_config.json", "max_seq_length"
    value = read_object(path).get(name)
    if value is None:
        path, name = folder / "tokenizer_config.json", "model_max_length"
        value = read_object(path).get(name)
        value = None if isinstance(value, (int, float)) and value > 1 << 31 else value
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ModelLoadError(f"{path}: {name} is {value!r}.")


def _inside(folder: Path, name: str, named_by: Path) -> Path:
    """Return a module's folder, which must lie within the model's."""
    resolved = (folder / name).resolve()
    if resolved != folder.resolve() and folder.resolve() not in resolved.parents:
        raise ModelLoadError(f"{named_by} names a folder outside: {name!r}.")
    return resolved


def _pooling_type(path: Path) -> str:
    config = read_object(path)
    named = config.get("pooling_mode")
    chosen = {
        flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on is True
    }
    types = {_POOLING_FLAGS.get(flag, flag) for flag in chosen}
    if named is not None:
        names = named if isinstance(named, list) else [named]
        types = {_POOLING_NAMES.get(str(name), str(name)) for name in names}
    if len(types) != 1 or not types <= set(_POOLING_FLAGS.values()):
        raise ModelLoadError(
            f"{path}: the pooling {', '.join(sorted(types)) or '(none)'} isn't supported; "
            "known: cls, lasttoken, mean."
        )
    return types.pop()


def _dense(folder: Path) -> DenseModule:
    path = folder / "config.json"
    config: dict[str, Any] = read_object(path)
    name = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS:
        raise ModelLoadError(f"{path}: the activation {name!r} isn't supported.")
    try:
        sizes = int(config["in_features"]), int(config["out_features"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} lacks the layer's sizes.") from error
    return DenseModule(folder, *sizes, bool(config.get("bias", True)), _ACTIVATIONS[name])
