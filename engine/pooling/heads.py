"""What comes after pooling: dense layers of sentence-transformers, classification heads.

Heads are small and kept in float32. Their weights' names are those of `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.models.experts import Weights
from engine.models.norms import LayerNorm, Transform, chain
from engine.models.weights import WeightReader
from engine.pooling.sentence_transformers import DenseModule
from kernels.activations import activation


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
_BEFORE = {
    "Bert": [(".pooler.dense", "tanh")],
    "NomicBert": [(".pooler.dense", "tanh")],
    "Electra": [("classifier.dense", "gelu")],
    "Roberta": [("classifier.dense", "tanh")],
    "XLMRoberta": [("classifier.dense", "tanh")],
    "Camembert": [("classifier.dense", "tanh")],
    "MPNet": [("classifier.dense", "tanh")],
    "DistilBert": [("pre_classifier", "relu")],
}
#: Families whose last layer isn't called `classifier`.
_LAST = dict.fromkeys(
    ("Electra", "Roberta", "XLMRoberta", "Camembert", "MPNet"), "classifier.out_proj"
)


class HeadReader:
    """Reads a classifier's head.

    Args:
        architecture: of config.json. prefix: of the encoder's own weights.
        width: the hidden size. num_labels: outputs.
        norm_eps: of ModernBERT's head, which has a norm.
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
        if "score.weight" in self._weights or self._family not in _BEFORE:
            return self._dense("score", self._labels)
        layers: list[Transform] = [
            self._dense(name, self._width, act) for name, act in _BEFORE[self._family]
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
    """A dense layer of sentence-transformers, from the safetensors in its folder.

    Raises `ModelLoadError` when it's missing or misshapen.
    """
    weights = WeightReader(module.folder)
    shape = (module.out_features, module.in_features)
    weight = weights.get("linear.weight", shape).float().clone()
    bias = None
    if module.bias:
        bias = weights.get("linear.bias", (module.out_features,)).float().clone()
    weights.close()
    return Dense(weight, bias, module.activation)
