"""`ModelFacts`: what the rest of the engine knows of a model, wherever the model itself is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.contract.pooling_params import GENERATE
from engine.contract.protocol import PoolingInfo
from engine.quantization.report import LayerReport
from engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """Of a model that gives vectors, labels or scores instead of text.

    Attributes:
        tasks: what it does, the usual one first.
        info: what gateways are told.
        encoder: each token sees all others: a prompt is computed whole, and nothing is cached.
        caches_prefixes: a prompt's result depends on its last token's hidden state alone.
    """

    tasks: tuple[str, ...]
    info: PoolingInfo
    encoder: bool
    caches_prefixes: bool


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine plans and answers with.

    Attributes:
        architecture: as config.json names it.
        vocab_size: columns of the logits.
        hidden_size: of a token's hidden state.
        num_parameters: for estimates of time.
        decode_bytes: weights that a decode step of one sequence reads.
        dtype: of the linear weights, as torch names it.
        max_model_len: the context that is served, in tokens.
        stateful: sequences carry a state that no block holds.
        takes_embeds: vectors may stand in for a prompt's embeddings.
        tokenizer: None with skip_tokenizer_init.
        tokenizer_folder: where gateways find its files.
        eos_token_ids: what ends an output.
        default_sampling: what the checkpoint presets.
        load_seconds: how long the load took.
        pooling: None of a model that generates.
        load_report: what became of each layer's weights; empty where nobody reports it.
        io_processor: plug-in that reads and answers a caller's `data`; "" for none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_parameters: int
    decode_bytes: int
    dtype: str
    max_model_len: int
    stateful: bool
    takes_embeds: bool
    tokenizer: Tokenizer | None
    tokenizer_folder: Path
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any]
    load_seconds: float
    pooling: PoolingFacts | None = None
    load_report: tuple[LayerReport, ...] = ()
    io_processor: str = ""

    @property
    def tasks(self) -> list[str]:
        """What the model does."""
        return [GENERATE] if self.pooling is None else list(self.pooling.tasks)

    @property
    def runs_whole_prompts(self) -> bool:
        """Whether a prompt can't be computed in chunks."""
        return self.pooling is not None and self.pooling.encoder
