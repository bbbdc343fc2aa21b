"""`EncoderSpec`: all that the native encoder needs to know of an architecture, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.layers.rotary import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names of weights without `.weight`; the defaults are BERT's.

    `""` means that the family has no such weight. `layer` holds the layer's number as `{}`; names
    of a layer's weights are relative to it. One name in `qkv` or `up` is one tensor. `prefix` is
    left out by checkpoints of the bare model.
    """

    prefix: str = "bert."
    embedding: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    relative_bias: str = ""
    final_norm: str = ""

    layer: str = "encoder.layer.{}."
    qkv: tuple[str, ...] = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
    )
    o: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    up: tuple[str, ...] = ("intermediate.dense",)
    down: str = "output.dense"
    mlp_norm: str = "output.LayerNorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """An encoder's architecture. Sizes are in elements.

    Attributes:
        architecture: name in config.json.
        max_position_embeddings: longest sequence.
        num_positions, position_offset: rows of the learned table and the first token's row; 0 rows
            for families without one.
        type_vocab_size: rows of the token type table, 0 for families without one.
        relative_buckets: rows of the table of relative position biases (T5's scheme), or 0.
        wiring: "post": norm(residual + f(residual)), as in BERT; "pre": residual + f(norm(.)).
        first_norm: with "pre": whether the first layer has a norm before its attention.
        norm_bias, qkv_bias, o_bias, mlp_bias: which of them have biases.
        reach: layer i sees tokens at most this far away on either side, 0 for all.
        ropes: rotary embedding by layer; (): no rotation.
        activation: "gelu", "gelu_tanh", "silu" or "relu".
        gated: the MLP multiplies the activated half with another one.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    names: EncoderNames = field(default_factory=EncoderNames)
    num_positions: int = 0
    position_offset: int = 0
    type_vocab_size: int = 0
    relative_buckets: int = 0
    wiring: Literal["post", "pre"] = "post"
    first_norm: bool = True
    norm_eps: float = 1e-12
    norm_bias: bool = True
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    reach: tuple[int, ...] = ()
    ropes: tuple[RopeSpec, ...] = ()
    activation: str = "gelu"
    gated: bool = False
    dtype: str = "float32"

    @property
    def num_parameters(self) -> int:
        """Parameters of the tables and the layers (norms and biases left out)."""
        matrices = 3 if self.gated else 2
        layer = 4 * self.num_heads * self.head_dim + matrices * self.intermediate_size
        tables = self.vocab_size + self.num_positions + self.type_vocab_size
        return (self.num_layers * layer + tables) * self.hidden_size

    @property
    def rope(self) -> RopeSpec | None:
        """What stretches the context: nothing, positions are the trained ones."""
        return None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Nothing is generated."""
        return ()

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding windows of the KV cache: there's none."""
        return ()

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Nothing of an encoder's tokens outlives their step."""
        return 0
