"""`DecoderSpec`: all that the native decoder needs to know of an architecture, as data."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.layers.rotary import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Shapes and switches of a decoder-only transformer. Lengths are in elements.

    `windows[i]` is layer i's sliding window in tokens (a token sees itself and window - 1 before
    it), 0 for full attention. Weight names are relative to the checkpoint; `{i}` is the layer.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope: RopeSpec
    norm_eps: float = 1e-6
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int, ...] = ()
    attention_scale: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    prefix: str = "model."
    dtype: str = "float32"
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the embedding, the layers and an untied head (norms left out)."""
        layer = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate_size)
        tables = 1 if self.tie_embeddings else 2
        return self.num_layers * layer + tables * self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.kv_size * element_size
