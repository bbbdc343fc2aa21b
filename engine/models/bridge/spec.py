"""What the rest of the engine must know of a bridged model."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layers.rotary import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSpec:
    """The bridge's counterpart of `DecoderSpec`. Sizes are in elements.

    Attributes:
        num_layers: attention calls of a forward pass, which is how many KV caches there are.
        kv_sizes: of each of these, the keys and values that one token takes.
        windows: each one's sliding window, 0 for full attention; () where the sizes differ: then
            all keep their blocks, and windows are kept by masking.
        state_size: of what a sequence keeps beside keys and values; 0: nothing.
    """

    architecture: str
    vocab_size: int
    hidden_size: int = 0
    max_position_embeddings: int
    num_layers: int = 0
    kv_sizes: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    state_size: int = 0
    num_parameters: int = 0
    rope: RopeSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    @property
    def state_bytes(self) -> int:
        """Of what a sequence keeps beside keys and values."""
        return 4 * self.state_size

    def kv_bytes_per_token(self, element_size: int, num_layers: int | None = None) -> int:
        """Bytes of KV cache that one token takes over `num_layers` layers, by default all.

        A model without attention keeps no keys and values. So that the pool still bounds how many
        sequences run, a token then takes its share of a state in a context of full length.
        """
        if not self.kv_sizes:
            return -(-self.state_bytes // self.max_position_embeddings)
        if num_layers is None or num_layers == self.num_layers:
            return sum(self.kv_sizes) * element_size
        return num_layers * self.kv_sizes[0] * element_size
