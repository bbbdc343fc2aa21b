"""`Eagle`: a layer over the model's last hidden states and the tokens behind them.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"; the heads of
their EAGLE-2 are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.speculative.heads.layer import HeadLayer
from engine.speculative.heads.layer_heads import LayerHeads, Target, layer_spec
from engine.speculative.heads.source import HeadSource


class Eagle(LayerHeads):
    """x = F [embedding of token j + 1, state j]; the layer, which norms nothing before attention,
    gives state j + 1, and the model's own output layer makes its logits.
    """

    def __init__(self, source: HeadSource, target: Target) -> None:
        """Read the checkpoint. Raises `ModelLoadError` for one that doesn't fit."""
        source.same("hidden_size", source.hidden_size)
        source.same("truncated_vocab_size", source.vocab_size)
        if source.flag("layernorms", default=False) or source.flag("add_para_norm", default=False):
            raise source.wrong("its inputs are normed (layernorms), which isn't run")
        spec, weights = layer_spec(source), source.weights
        at = source.prefix("layers.0.", "transformer.")
        if f"{at}input_layernorm.weight" in weights:
            raise source.wrong(f"{at}input_layernorm.weight is there: EAGLE's layer has none")
        fusion = source.prefix("fc", "fusion_fc")
        self.width = self.columns = spec.hidden_size
        self._fusion = source.stacked([(fusion, self.width)], 2 * self.width)
        self.layer = HeadLayer(source, spec, at, self.width, target.max_model_len)
        # Checkpoints that have these too have copies of the model's.
        weights.mark_read([name for name in weights.names() if name.startswith(_COPIES)])
        self._model = target.model
        self.nbytes = source.nbytes

    def states(self, hidden: Tensor) -> Tensor:
        """See the base."""
        return hidden

    def mixed(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See the base."""
        embedded = self._model.embedding.rows(tokens).to(states.dtype)
        x = self._fusion(torch.cat((embedded, states), dim=-1))
        return x, x

    def logits(self, states: Tensor) -> Tensor:
        """See the base."""
        return self._model.logits(states)


_COPIES = ("embed_tokens.", "lm_head.", "model.embed_tokens.")
