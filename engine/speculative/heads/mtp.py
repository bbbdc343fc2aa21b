"""`Mtp`: the multi-token prediction layer in a model's own checkpoint.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", 2.2; GLM-4.5's is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoints.safetensors import WeightReader
from engine.contract.errors import ModelLoadError
from engine.models.decoder_spec import COUNT, FAMILIES, DecoderSpec, num_mtp_layers, with_mtp_layer
from engine.models.forward_context import AttentionMetadata, LayerCache
from engine.models.layers.attention import SelfAttention
from engine.models.layers.build_layer import build_layer
from engine.models.layers.describe import describe_layer
from engine.models.layers.linear import FusedLinear, LinearPart, NormDescription, TableDescription
from engine.models.layers.mla import MlaAttention
from engine.models.layers.moe import Weights
from engine.models.layers.norm import make_norm
from engine.models.layers.weights import LayerWeights
from engine.models.weight_loader import WeightLoader
from engine.quantization.packing import QuantScheme
from engine.speculative.heads.layer import LayerDraftHeads, PagedLayer, TargetModel
from kernels import KernelSet
from kernels.interface import NO_NORM


@dataclass(frozen=True, slots=True)
class MtpSource:
    """Source of such layers' weights, and how they are stored.

    Attributes:
        folder, config: the checkpoint's folder, and its config.json.
        weights: its tensors.
        dtype, scheme: how linear weights are stored.
    """

    folder: Path
    config: dict[str, Any]
    weights: Weights
    dtype: torch.dtype
    scheme: QuantScheme

    def error(self, why: str) -> ModelLoadError:
        """Return the error for an unusable checkpoint."""
        return ModelLoadError(f"{self.folder}: {why}.")


class MtpLayer(PagedLayer):
    """A decoder layer like the model's."""

    def __init__(self, ops: KernelSet, spec: DecoderSpec, weights: LayerWeights) -> None:
        super().__init__(ops, spec)
        self._layer = build_layer(spec, ops, weights, NO_NORM, spec.num_layers - 1)
        attention = getattr(self._layer, "attention", None)
        if not isinstance(attention, (SelfAttention, MlaAttention)) or (
            isinstance(attention, SelfAttention) and attention.gated
        ):
            raise ModelLoadError(
                f"Heads of {spec.architecture}, whose layers carry states or whose attention has "
                "gates, aren't supported.",
                param="speculative_config",
            )
        self._attention = attention

    def write(self, x: Tensor, positions: Tensor, slots: Tensor) -> None:
        attention, heads = self._attention, (-1, self._spec.head_dim)
        if isinstance(attention, MlaAttention):
            attention.write(x, positions, slots, LayerCache(self._keys, self._values))
            return
        q, k, v = (
            part.unflatten(-1, heads)
            for part in attention.project(x).split(attention.sizes, dim=-1)
        )
        self._ops.rope_and_cache(
            q, k, v, positions, attention.cos_sin, self._keys, self._values, slots,
            q_norm_weight=attention.q_norm, k_norm_weight=attention.k_norm, eps=attention.eps,
            neox=attention.neox,
        )  # fmt: skip

    def __call__(self, x: Tensor, residual: Tensor, step: AttentionMetadata) -> Tensor:
        """See the base; the residual is modified in place."""
        cache = LayerCache(self._keys, self._values)
        _, residual = self._layer(x, residual, step, cache, None)
        return residual


class Mtp(LayerDraftHeads):
    """Residual j = P [norm of the embedding of token j + 1, norm of state j]. The layer returns
    state j + 1, whose norm the output layer receives.

    Embedding and output layer are the model's, unless the checkpoint has separate ones.
    """

    def __init__(self, source: MtpSource, target: TargetModel) -> None:
        """Read the checkpoint. Raises `ModelLoadError` for one without such a layer."""
        model, full_spec = target.model, target.model.full_spec
        _check(source, full_spec)
        spec = with_mtp_layer(full_spec)
        prefix = full_spec.names.layer.format(full_spec.num_layers)
        loader = WeightLoader(
            spec, model.ops, source.dtype, target.max_model_len, source.weights, source.scheme
        )
        projection = f"{prefix}eh_proj"
        if f"{projection}.weight" not in source.weights and not loader.has_packed(projection):
            raise source.error(
                f"config.json's {COUNT} is {num_mtp_layers(source.config)}, but the checkpoint has "
                f"no '{prefix}eh_proj.weight': its layers for drafts were left out"
            )
        width = self.width = self.columns = spec.hidden_size

        def norm(name: str) -> Callable[[Tensor], Tensor]:
            weights = loader.norm(NormDescription(prefix + name, width))
            return make_norm(model.ops, weights, width, spec.norm_eps)

        self._token_norm, self._state_norm = norm("enorm"), norm("hnorm")
        self._norm = norm("shared_head.norm")
        part = (LinearPart(f"{prefix}eh_proj", width),)
        self._fusion = loader.linear(FusedLinear(parts=part, columns=2 * width))
        weights = loader.layer(describe_layer(spec, full_spec.num_layers))
        self._input_norm = make_norm(model.ops, weights.input_norm, width, spec.norm_eps)
        self.layer = MtpLayer(model.ops, spec, weights)
        self.nbytes = self._fusion.nbytes + weights.nbytes
        self._model, self._embedding, self._head = model, model.embedding, None
        names = spec.names
        model_head = names.embedding if spec.tie_embeddings else names.lm_head
        table = spec.vocab_size, width
        if not _is_copy(source.weights, f"{prefix}embed_tokens", names.embedding, table):
            self._embedding = loader.table(TableDescription(f"{prefix}embed_tokens"))
            self.nbytes += self._embedding.nbytes
        if not _is_copy(source.weights, f"{prefix}shared_head.head", model_head, table):
            self._head = loader.table(TableDescription(f"{prefix}shared_head.head"))
            self.nbytes += self._head.nbytes

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def combine_inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._token_norm(self._embedding.rows(tokens).to(states.dtype))
        residual = self._fusion(torch.cat((embedded, self._state_norm(states)), dim=-1))
        return self._input_norm(residual), residual

    def logits(self, states: Tensor) -> Tensor:
        x = self._norm(states)
        return self._model.logits(x) if self._head is None else self._head(x).float()


def _check(source: MtpSource, spec: DecoderSpec) -> None:
    """Raise `ModelLoadError` unless the checkpoint declares exactly one such layer."""
    if spec.architecture not in FAMILIES:
        raise source.error(
            f"no layers for drafts are known of {spec.architecture}; of {', '.join(FAMILIES)} they "
            "are"
        )
    if (count := num_mtp_layers(source.config)) != 1:
        had = f"{count} layers for drafts" if count else "no layers for drafts"
        raise source.error(f"the checkpoint has {had} ({COUNT} in config.json); one is run")


def _is_copy(weights: Weights, name: str, original: str, shape: tuple[int, int]) -> bool:
    """Whether a table is missing, or a copy of another one."""
    names = [f"{table}.weight" for table in (name, original)]
    if not isinstance(weights, WeightReader) or names[0] not in weights:
        return True
    if names[1] not in weights:
        return False
    same = torch.equal(*(weights.get(name, shape) for name in names))
    weights.release()
    return same
