"""A model folder's description as a pooling model: task, pooled tokens, activation.

It is read from config.json, the engine's `runner`, `convert` and `pooler_config`, and the files
of sentence-transformers beside the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, ModelLoadError
from engine.models.encoders.encoder_spec import is_encoder
from engine.models.registry import native_architectures
from engine.models.vision.dual_encoder import DUAL_ENCODERS
from engine.models.vision.registry import VISION_FAMILIES
from engine.pooling.sentence_transformers import SentenceFiles, read_sentence_files
from engine.text.tokenizer_files import read_object

POOLING_TYPES = ("CLS", "LAST", "MEAN")
#: Late interaction: a short vector for each token.
_RETRIEVAL = "ForRetrieval"
_SEQUENCE, _TOKEN = "ForSequenceClassification", "ForTokenClassification"
_NO_FILES = SentenceFiles()
_POOLER_KEYS = ("pooling_type", "normalize", "use_activation", "dimensions")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingModelConfig:
    """A pooling model's description.

    Attributes:
        architecture: the name in config.json.
        encoder: whether it is a bidirectional encoder; else it is a causal decoder.
        tasks: its tasks, see `engine.contract.pooling_params`.
        pooling_type: "CLS", "LAST" or "MEAN": the hidden states that make a prompt's vector.
        activation: applied to results unless a request says otherwise: "normalize",
            "softmax", "sigmoid" or "" for nothing.
        labels: names of a classifier's outputs, in order; () for embeddings.
        tokens: tokens whose rows of the output layer form the classifier; () if it has a head.
        is_bidirectional: whether two such tokens form one label, the second's lead over the first.
        matryoshka: dimensions that embeddings may be truncated to; () for any, None for none.
        dimensions: dimensions of embeddings unless a request says otherwise; None for all.
        files: the settings from sentence-transformers' files.
        vector_size: size of each token's vector in a model for late interaction; 0 for others.
    """

    architecture: str
    encoder: bool
    tasks: tuple[str, ...]
    pooling_type: str
    activation: str
    labels: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    is_bidirectional: bool = False
    matryoshka: tuple[int, ...] | None = None
    dimensions: int | None = None
    files: SentenceFiles = _NO_FILES
    vector_size: int = 0

    @property
    def max_length(self) -> int | None:
        """Default maximum prompt length in tokens; None for the model's context length."""
        return self.files.max_seq_length

    @property
    def classifies(self) -> bool:
        """Whether it has a classification head."""
        return bool(self.labels)

    @property
    def caches_prefixes(self) -> bool:
        """Whether a prompt's vector can be computed without the hidden states of its prefix."""
        return not self.encoder and self.pooling_type == "LAST"


def read_pooling_config(
    config: EngineConfig, folder: Path, raw: dict[str, Any]
) -> PoolingModelConfig | None:
    """Return the settings of a folder whose config.json is `raw`; None for a model that generates.

    Raises:
        ConfigError: `runner`, `convert` or `pooler_config` don't fit the model.
        ModelLoadError: a file of sentence-transformers is invalid or not supported.
    """
    architecture = str((raw.get("architectures") or [""])[0])
    files = read_sentence_files(folder)
    convert_type = _default_convert(architecture, files)
    asked = config.runner == "pooling" or config.convert in ("embed", "classify")
    if config.runner == "generate" or (convert_type is None and not asked):
        _check_generates(architecture, config)
        return None
    convert = config.convert if config.convert in ("embed", "classify") else convert_type or "embed"
    _refuse_bidirectional(raw)
    try:
        if convert == "classify":
            cross_encoder = read_object(folder / "config_sentence_transformers.json")
            if (activation := cross_encoder.get("activation_fn")) is not None:
                raw = {**raw, "sentence_transformers": {"activation_fn": activation}}
            classifier_config = _classifier(architecture, raw)
        else:
            classifier_config = _embedder(architecture, raw, files)
    except (TypeError, ValueError, AttributeError) as error:
        reason = f"config.json of {architecture} has a value of the wrong type: {error}."
        raise ModelLoadError(reason) from error
    return _with_pooler_config(classifier_config, config.pooler_config)


def _check_generates(architecture: str, config: EngineConfig) -> None:
    """Raise `ConfigError` for a model without a language model's head, or settings for pooling."""
    if _default_convert(architecture, SentenceFiles()) is not None:
        raise ConfigError(f"{architecture} doesn't generate text.", param="runner")
    for name in ("convert", "pooler_config"):
        if getattr(config, name) not in (None, "auto", "none"):
            raise ConfigError(
                f"{name} is for pooling models, but {architecture} is to generate text.",
                param=name,
            )


def _default_convert(architecture: str, files: SentenceFiles) -> str | None:
    """Return the architecture's default task: "embed", "classify" or None for generation."""
    if architecture.endswith((_SEQUENCE, _TOKEN)):
        return "classify"
    bare = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    # Some that generate have such names as well: ChatGLMModel, UltravoxModel.
    bare = bare and architecture not in {*native_architectures(), *VISION_FAMILIES}
    if bare or is_encoder(architecture) or files.pooling_type or architecture.endswith(_RETRIEVAL):
        return "embed"
    return None


def _embedder(architecture: str, raw: dict[str, Any], files: SentenceFiles) -> PoolingModelConfig:
    """Return the defaults without sentence-transformers' files: normalized; CLS for encoders,
    LAST for decoders and for encoders of texts and pictures.
    """
    if architecture.endswith(_RETRIEVAL):
        size = int(raw.get("embedding_dim", 128))
        if size < 1:
            raise ValueError(f"embedding_dim must be at least 1; got {size}")
        return PoolingModelConfig(
            architecture=architecture,
            encoder=False,
            tasks=("token_embed",),
            pooling_type="LAST",
            activation="normalize",
            vector_size=size,
        )
    is_dual = architecture in DUAL_ENCODERS
    encoder = is_dual or is_encoder(architecture)
    normalize = files.normalize if files.pooling_type else True
    matryoshka = raw.get("matryoshka_dimensions")
    if matryoshka is None and raw.get("is_matryoshka"):
        matryoshka = []
    return PoolingModelConfig(
        architecture=architecture,
        encoder=encoder,
        tasks=("embed", "score") if is_dual else ("embed", "token_embed", "score"),
        pooling_type=files.pooling_type or ("CLS" if encoder and not is_dual else "LAST"),
        activation="normalize" if normalize else "",
        matryoshka=None if matryoshka is None else tuple(int(size) for size in matryoshka),
        files=files,
    )


def _classifier(architecture: str, raw: dict[str, Any]) -> PoolingModelConfig:
    head_tokens, two_way = _head_tokens(raw)
    labels = (head_tokens[1:] if two_way else head_tokens) or _labels(raw)
    encoder = is_encoder(architecture)
    by_token = architecture.endswith(_TOKEN)
    tasks: tuple[str, ...] = ("token_classify",) if by_token else ("classify",)
    if len(labels) == 1 and not by_token:
        tasks = ("classify", "score")
    pooling_type = "CLS" if encoder else "LAST"
    if architecture.startswith("ModernBert"):
        pooling_type = str(raw.get("classifier_pooling", "cls")).upper()
    return PoolingModelConfig(
        architecture=architecture,
        encoder=encoder,
        tasks=tasks,
        pooling_type=pooling_type,
        activation=_activation(raw, len(labels)),
        labels=labels,
        tokens=head_tokens,
        is_bidirectional=two_way,
    )


def _head_tokens(raw: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return `classifier_from_token`, and whether its two tokens form one label.

    vLLM's names: `method` is "from_2_way_softmax" or "no_post_processing", the default, except
    with `is_original_qwen3_reranker`.
    """
    tokens = raw.get("classifier_from_token")
    if tokens is None:
        return (), False
    is_list_of_names = (
        isinstance(tokens, list) and tokens and all(isinstance(t, str) for t in tokens)
    )
    default = "from_2_way_softmax" if raw.get("is_original_qwen3_reranker") else ""
    method = raw.get("method") or default or "no_post_processing"
    two_way = method == "from_2_way_softmax"
    if (
        not is_list_of_names
        or method not in ("from_2_way_softmax", "no_post_processing")
        or (two_way and len(tokens) != 2)
    ):
        raise ModelLoadError(
            f"config.json: classifier_from_token {tokens!r} doesn't fit the method {method!r}.",
            param="classifier_from_token",
        )
    return tuple(tokens), two_way


def _labels(raw: dict[str, Any]) -> tuple[str, ...]:
    """Return names from `id2label`; without it, `num_labels` (default 2) generated ones."""
    names = raw.get("id2label")
    if isinstance(names, dict) and names:
        try:
            by_id = {int(index): str(name) for index, name in names.items()}
        except ValueError as error:
            raise ModelLoadError(f"config.json: id2label: {error}.", param="id2label") from error
        if sorted(by_id) != list(range(len(by_id))):
            raise ModelLoadError(
                "config.json: id2label must name all ids from 0 on.", param="id2label"
            )
        return tuple(by_id[index] for index in range(len(by_id)))
    count = int(raw.get("num_labels") or 2)
    return tuple(f"LABEL_{index}" for index in range(count))


def _activation(raw: dict[str, Any], num_labels: int) -> str:
    """Return the activation of sentence-transformers' cross-encoders, else the one for
    `problem_type`, else the one for the number of labels.
    """
    named = (raw.get("sentence_transformers") or {}).get("activation_fn") or raw.get(
        "sbert_ce_default_activation_function"
    )
    if named is not None:
        kind = str(named).rsplit(".", 1)[-1]
        functions = {"Sigmoid": "sigmoid", "Identity": "", "Softmax": "softmax"}
        if kind not in functions:
            raise ModelLoadError(
                f"config.json: the activation {named!r} isn't supported.", param="activation_fn"
            )
        return functions[kind]
    problem = raw.get("problem_type")
    if problem == "regression":
        return ""
    if problem == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"


def _with_pooler_config(
    settings: PoolingModelConfig, overrides: dict[str, Any] | None
) -> PoolingModelConfig:
    """Return the settings with the operator's `pooler_config` applied."""
    for key in overrides or {}:
        if key not in _POOLER_KEYS:
            raise ConfigError(
                f"pooler_config: {key!r} isn't one of {', '.join(_POOLER_KEYS)}.",
                param="pooler_config",
            )
    overrides = overrides or {}
    pooling_type = overrides.get("pooling_type", settings.pooling_type)
    if not isinstance(pooling_type, str) or pooling_type.upper() not in POOLING_TYPES:
        raise ConfigError(
            f"pooler_config: pooling_type must be one of {', '.join(POOLING_TYPES)}; "
            f"got {pooling_type!r}.",
            param="pooler_config",
        )
    settings = replace(settings, pooling_type=pooling_type.upper())
    use = overrides.get("use_activation", overrides.get("normalize"))
    if use is not None and not isinstance(use, bool):
        raise ConfigError("pooler_config: use_activation must be a boolean.", param="pooler_config")
    if use is False:
        settings = replace(settings, activation="")
    elif use and not settings.activation:
        default = _activation({}, len(settings.labels)) if settings.labels else "normalize"
        settings = replace(settings, activation=default)
    return replace(settings, dimensions=_dimensions(settings, overrides.get("dimensions")))


def _dimensions(settings: PoolingModelConfig, value: Any) -> int | None:
    if value is None:
        return None
    allowed = settings.matryoshka
    sound = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not sound or allowed is None or (allowed and value not in allowed):
        raise ConfigError(
            f"pooler_config: dimensions = {value!r} isn't one of this model's.",
            param="pooler_config",
        )
    return int(value)


def _refuse_bidirectional(raw: dict[str, Any]) -> None:
    """Raise `ModelLoadError` for decoders that were trained with bidirectional attention."""
    for name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        if raw.get(name) is not None and raw[name] is not causal:
            raise ModelLoadError(
                f"config.json: {name} = {raw[name]!r}: decoders that attend in both directions "
                "aren't supported.",
                param=name,
            )
