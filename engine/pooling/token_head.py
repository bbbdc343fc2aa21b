"""A classification head made from a language model's output layer.

Rerankers that were trained to say "yes" or "no" are causal models whose next token is the verdict:
the rows of the output layer that belong to these tokens are all of a head that is needed.
"""

from __future__ import annotations

import torch

from engine.contract.errors import ModelLoadError
from engine.models.experts import Weights
from engine.models.spec import DecoderSpec
from engine.pooling.heads import Dense
from engine.pooling.settings import PoolingSettings
from engine.text.tokenizer import Tokenizer


def token_head(
    settings: PoolingSettings, spec: DecoderSpec, weights: Weights, tokenizer: Tokenizer
) -> Dense:
    """[n, hidden] -> [n, labels] from the rows of `settings.tokens`.

    With `two_way` the one logit is the second token's minus the first's, so that its sigmoid is the
    second's part of a softmax over both.

    Raises `ModelLoadError` for a token that the vocabulary doesn't have.
    """
    names, shape = spec.names, (spec.vocab_size, spec.hidden_size)
    bare = names.embedding.removeprefix(names.optional_prefix)
    sources = (names.lm_head, names.embedding, bare)  # where the layers are tied, the embedding's
    source = next((name for name in sources if f"{name}.weight" in weights), names.embedding)
    table = weights.get(f"{source}.weight", shape)
    rows = table[torch.tensor([_id(token, tokenizer) for token in settings.tokens])].float()
    if settings.two_way:
        rows = rows[1:] - rows[:1]
    return Dense(rows.clone(), None)


def _id(token: str, tokenizer: Tokenizer) -> int:
    found = tokenizer.piece_to_id(token)
    if found is None:
        raise ModelLoadError(
            f"classifier_from_token: the vocabulary has no {token!r}.",
            param="classifier_from_token",
        )
    return found
