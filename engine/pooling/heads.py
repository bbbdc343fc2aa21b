"""The layers after pooling: sentence-transformers' dense layers, and classification heads.

Heads are small and kept in float32. Their weights' names are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoints.torch_files import open_hub_folder
from engine.contract.errors import ModelLoadError
from engine.models.decoder_spec import DecoderSpec
from engine.models.layers.moe import Weights
from engine.models.layers.norm import LayerNorm, Transform, chain
from engine.pooling.pooling_config import PoolingModelConfig
from engine.pooling.sentence_transformers import DenseModule
from engine.quantization.packing import DenseSource, WeightSource
from engine.text.tokenizer import Tokenizer
from kernels.layers import activation


class ClassifierHeadFactory:
    """Makes a head and keeps the tensors that it consists of.

    Args:
        weights: the checkpoint's weights.
        make: reads a head from weights.

    Attributes:
        head: the checkpoint's head.
        tensors: the tensors of that head by name, in float32.
        shapes: the shapes of these tensors by name.
    """

    def __init__(self, weights: Weights, make: Callable[[Weights], Transform]) -> None:
        tensors = dict[str, Tensor]()
        self._make, self.tensors = make, tensors
        self.head = make(_RecordingWeights(weights, tensors))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Transform:
        """Make a head in which these tensors replace its own, or add biases that it lacks."""
        return self._make(_InMemoryWeights({**self.tensors, **tensors}))


class _RecordingWeights:
    """Records which of a checkpoint's weights are read."""

    def __init__(self, inner: Weights, read: dict[str, Tensor]) -> None:
        self._inner, self._read = inner, read

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights.get`."""
        self._read[name] = self._inner.get(name, shape).float().clone()
        return self._read[name]

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """See `Weights.matrix`."""
        return DenseSource(self.get(name, shape))

    def release(self) -> None:
        """See `Weights.release`."""
        self._inner.release()


class _InMemoryWeights:
    """Weights in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See `Weights.get`."""
        return self._tensors[name].float()

    def matrix(self, name: str, shape: tuple[int, int]) -> WeightSource:
        """See `Weights.matrix`."""
        return DenseSource(self.get(name, shape))

    def release(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(slots=True)
class Dense:
    """activation(x W^T + b) of [n, in] with W float32 [out, in]."""

    weight: Tensor
    bias: Tensor | None
    activation: str = ""

    def __call__(self, x: Tensor) -> Tensor:
        """[n, out]."""
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        if not self.activation:
            return y
        return torch.tanh(y) if self.activation == "tanh" else activation(self.activation)(y)


#: A head's layers before the last one: (name, activation). A leading "." stands for the prefix of
#: the encoder's own weights.
_DENSE_LAYERS = {
    "Bert": [(".pooler.dense", "tanh")],
    "NomicBert": [(".pooler.dense", "tanh")],
    "Electra": [("classifier.dense", "gelu")],
    "Roberta": [("classifier.dense", "tanh")],
    "XLMRoberta": [("classifier.dense", "tanh")],
    "Camembert": [("classifier.dense", "tanh")],
    "MPNet": [("classifier.dense", "tanh")],
    "DistilBert": [("pre_classifier", "relu")],
}
#: Families whose last layer has a name other than `classifier`.
_LAST = dict.fromkeys(
    ("Electra", "Roberta", "XLMRoberta", "Camembert", "MPNet"), "classifier.out_proj"
)


class HeadReader:
    """Reads a classifier's head.

    Args:
        architecture: the name in config.json. prefix: the prefix of the encoder's weights.
        width: the hidden size. num_labels: the number of outputs.
        norm_eps: the epsilon of the norm in ModernBERT's head.
    """

    def __init__(
        self,
        weights: Weights,
        architecture: str,
        prefix: str,
        width: int,
        num_labels: int,
        norm_eps: float,
    ) -> None:
        self._weights, self._prefix, self._eps = weights, prefix, norm_eps
        self._width, self._labels = width, num_labels
        self._family, _, self._kind = architecture.partition("For")

    def head(self) -> Transform:
        """[n, hidden] -> [n, labels]."""
        if self._family == "ModernBert":
            return chain(self._modernbert(), self._dense("classifier", self._labels))
        if self._kind == "TokenClassification":
            name = "classifier" if "classifier.weight" in self._weights else "score"
            return self._dense(name, self._labels)
        if "score.weight" in self._weights or self._family not in _DENSE_LAYERS:
            return self._dense("score", self._labels)
        layers: list[Transform] = [
            self._dense(name, self._width, act) for name, act in _DENSE_LAYERS[self._family]
        ]
        layers.append(self._dense(_LAST.get(self._family, "classifier"), self._labels))
        return chain(*layers)

    def _dense(self, name: str, rows: int, act: str = "") -> Dense:
        name = self._prefix + name[1:] if name.startswith(".") else name
        weight = self._weights.get(f"{name}.weight", (rows, self._width)).float().clone()
        bias = f"{name}.bias"
        has_bias = bias in self._weights
        return Dense(weight, self._vector(bias, rows) if has_bias else None, act)

    def _modernbert(self) -> Transform:
        """Dense, GELU, norm."""
        width = self._width
        bias = self._vector("head.norm.bias", width) if "head.norm.bias" in self._weights else None
        norm = LayerNorm(width, self._vector("head.norm.weight", width), bias, self._eps)
        return chain(self._dense("head.dense", width, "gelu"), norm)

    def _vector(self, name: str, size: int) -> Tensor:
        return self._weights.get(name, (size,)).float().clone()


def dense_module(module: DenseModule) -> Dense:
    """Read a dense layer of sentence-transformers from its folder.

    Raises `ModelLoadError` when it's missing or misshapen.
    """
    weights = open_hub_folder(module.folder)
    shape = (module.out_features, module.in_features)
    weight = weights.get("linear.weight", shape).float().clone()
    bias = None
    if module.bias:
        bias = weights.get("linear.bias", (module.out_features,)).float().clone()
    weights.close()
    return Dense(weight, bias, module.activation)


# -- A classification head made from a language model's output layer.
#
# Rerankers that were trained to say "yes" or "no" are causal models whose next token is the
# verdict:
# the rows of the output layer that belong to these tokens are all of a head that is needed.


def token_head(
    settings: PoolingModelConfig, spec: DecoderSpec, weights: Weights, tokenizer: Tokenizer
) -> Dense:
    """[n, hidden] -> [n, labels] from the rows of `settings.tokens`.

    With `is_bidirectional` the one logit is the second token's minus the first's, so that its
    sigmoid is the second's part of a softmax over both.

    Raises `ModelLoadError` for a token that the vocabulary doesn't have.
    """
    names, shape = spec.names, (spec.vocab_size, spec.hidden_size)
    bare = names.embedding.removeprefix(names.optional_prefix)
    sources = (names.lm_head, names.embedding, bare)  # where the layers are tied, the embedding's
    source = next((name for name in sources if f"{name}.weight" in weights), names.embedding)
    table = weights.get(f"{source}.weight", shape)
    rows = table[torch.tensor([_id(token, tokenizer) for token in settings.tokens])].float()
    if settings.is_bidirectional:
        rows = rows[1:] - rows[:1]
    return Dense(rows.clone(), None)


def _id(token: str, tokenizer: Tokenizer) -> int:
    token_id = tokenizer.piece_to_id(token)
    if token_id is None:
        raise ModelLoadError(
            f"classifier_from_token: the vocabulary has no {token!r}.",
            param="classifier_from_token",
        )
    return token_id
