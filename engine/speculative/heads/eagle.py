"""`Eagle`: a decoder layer over the model's last hidden states and the tokens that follow them.

Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"; EAGLE-2 uses
the same heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.speculative.heads.base import HeadCheckpoint
from engine.speculative.heads.layer import HeadLayer, LayerDraftHeads, TargetModel, layer_spec

# `Eagle3`: a layer over three of the model's hidden states, with a separate vocabulary.
#
# Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
# Training-Time Test".


_IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3(LayerDraftHeads):
    """State j = F [inputs of three of the model's layers at token j]. Attention receives the
    concatenated norms of the embedding of token j + 1 and of state j. The layer returns state
    j + 1, whose norm the output layer receives. That may cover frequent tokens only.
    """

    def __init__(self, source: HeadCheckpoint, target: TargetModel) -> None:
        source.same("target_hidden_size", source.hidden_size)
        spec, weights = layer_spec(source), source.weights
        width = self.width = spec.hidden_size
        self._eps = spec.norm_eps
        self.taps = tapped_layers(source, target.model.spec.num_layers)
        fusion, layer_prefix = source.prefix("fc."), source.prefix("midlayer.", "layers.0.")
        self.columns = len(self.taps) * source.hidden_size
        self._fusion = source.stacked([(fusion.removesuffix("."), width)], self.columns)
        self.layer = HeadLayer(source, spec, layer_prefix, 2 * width, target.max_model_len)
        self._token_norm = source.vector(f"{layer_prefix}input_layernorm.weight", width)
        self._state_norm = source.vector(f"{layer_prefix}hidden_norm.weight", width)
        self._norm = source.vector(f"{source.prefix('norm.')}weight", width)
        usual = "speculators_model_type" in source.config
        self._adds_normed = source.flag("norm_before_residual", default=usual)
        self._scale = source.positive("logit_scale", 1.0)
        self._tokens = _draft_tokens(source)
        self._tokens = self._tokens.to(source.ops.device)
        self._vocab_size, count = source.vocab_size, len(self._tokens)
        self._head = source.linear("lm_head.weight", count, width)
        self._embedding = target.model.embedding
        embedding_name = f"{source.prefix('embed_tokens.')}weight"
        if embedding_name in weights:
            self._embedding = source.linear(embedding_name, source.vocab_size, width)
        elif width != source.hidden_size:
            raise source.error(f"hidden_size is {width}: it needs embed_tokens of its own")
        self._ops, self.nbytes = source.ops, source.nbytes

    def states(self, hidden: Tensor) -> Tensor:
        return self._fusion(hidden)

    def combine_inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        states = states.contiguous()
        embedded = self._embedding.rows(tokens).to(states.dtype)
        embedded = self._ops.rms_norm(embedded, self._token_norm, self._eps)
        normed = self._ops.rms_norm(states, self._state_norm, self._eps)
        return torch.cat((embedded, normed), dim=-1), normed if self._adds_normed else states

    def logits(self, states: Tensor) -> Tensor:
        logits = self._head(self._ops.rms_norm(states, self._norm, self._eps)).float() * self._scale
        spread = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return spread.index_copy_(1, self._tokens, logits)


def tapped_layers(source: HeadCheckpoint, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the model's layers whose inputs the heads read: one near its start, the
    middle one, and one near its end, unless config.json says otherwise.
    """
    within = source.config.get("eagle_config") or {}
    if not isinstance(within, dict) or within.get("use_aux_hidden_state", True) is not True:
        raise source.error("eagle_config without use_aux_hidden_state isn't run")
    layer_ids = source.config.get(_IDS) or within.get(_IDS)
    layers = [2, num_layers // 2, num_layers - 3] if layer_ids is None else layer_ids
    are_integers = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    sound = are_integers and len(layers) > 0 and layers == sorted({*layers})
    if not sound or not 0 <= layers[0] <= layers[-1] < num_layers:
        origin = "by default" if layer_ids is None else "in config.json"
        raise source.error(
            f"{_IDS} must be ascending layers of the model's {num_layers}; {origin} they are "
            f"{layers!r:.80}"
        )
    return tuple(layers)


def _draft_tokens(source: HeadCheckpoint) -> Tensor:
    """Return int64 [draft_vocab_size], the token of each column of the output layer."""
    vocab = source.vocab_size
    count = source.integer("draft_vocab_size", 1, vocab, default=vocab)
    source.weights.mark_used(["t2d"])  # the inverse mapping
    tokens = torch.arange(count)
    if count < vocab or "d2t" in source.weights:
        tokens = tokens + source.integers("d2t", count)
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab or len(tokens.unique()) < count:
        raise source.error(f"'d2t' must lead to different tokens in [0, {vocab})")
    return tokens


class Eagle(LayerDraftHeads):
    """x = F [embedding of token j + 1, state j]. The layer, which has no norm before attention,
    returns state j + 1, from which the model's output layer computes logits.
    """

    def __init__(self, source: HeadCheckpoint, target: TargetModel) -> None:
        source.same("hidden_size", source.hidden_size)
        source.same("truncated_vocab_size", source.vocab_size)
        if source.flag("layernorms", default=False) or source.flag("add_para_norm", default=False):
            raise source.error("its inputs are normed (layernorms), which isn't run")
        spec, weights = layer_spec(source), source.weights
        layer_prefix = source.prefix("layers.0.", "transformer.")
        if f"{layer_prefix}input_layernorm.weight" in weights:
            raise source.error(
                f"{layer_prefix}input_layernorm.weight is there: EAGLE's layer has none"
            )
        fusion = source.prefix("fc", "fusion_fc")
        self.width = self.columns = spec.hidden_size
        self._fusion = source.stacked([(fusion, self.width)], 2 * self.width)
        self.layer = HeadLayer(source, spec, layer_prefix, self.width, target.max_model_len)
        # Checkpoints may contain copies of the model's tables.
        weights.mark_used([name for name in weights.names() if name.startswith(_COPIES)])
        self._model = target.model
        self.nbytes = source.nbytes

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def combine_inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self._model.embedding.rows(tokens).to(states.dtype)
        x = self._fusion(torch.cat((embedded, states), dim=-1))
        return x, x

    def logits(self, states: Tensor) -> Tensor:
        return self._model.logits(states)


_COPIES = ("embed_tokens.", "lm_head.", "model.embed_tokens.")
