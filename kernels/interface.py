"""The contract of the kernels: what each function takes, gives and changes.

T is the number of tokens of a step, H the hidden size, D the size of a head, Hq and Hk the number
of query and of key/value heads (Hq is a multiple of Hk). Activations are float32, bfloat16 or
float16; what matters for accuracy (norms, softmax, sums) is computed in float32. Wrong shapes,
dtypes, positions, slots or block ids raise ValueError before anything is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class LinearLayer(ABC):
    """y = x W^T + b with W [N, K] in whatever layout the implementation likes best."""

    in_features: int
    out_features: int
    nbytes: int
    """Bytes that one pass over the weight reads."""

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N] in x's dtype. Rows may be strided; `out` must be contiguous."""


class KernelSet(ABC):
    """One implementation of every operation."""

    name: str
    why: str

    @abstractmethod
    def PackedLinear(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        quantization: str | None = None,
        group_size: int | None = None,
    ) -> LinearLayer:
        """A linear layer of weight [N, K] and bias [N].

        Nothing refers to `weight` afterwards where a packed copy is made, so the caller can free
        it layer by layer. `quantization` is None, "int8" or "int4", with one scale for
        `group_size` neighbours of a row: a multiple of 16 up to 256, by default 128 for int8 and
        32 for int4.
        """

    @abstractmethod
    def IntegerLinear(
        self,
        values: Tensor,
        scales: Tensor,
        minima: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        bits: int,
    ) -> LinearLayer:
        """A linear layer of weights that are quantised already.

        values int8 [N, K], scales and minima [N, K / group]; bits 8: weight = scale * value with
        values in [-127, 127]; bits 4: scale * (value - 8), or with minima scale * value - minimum,
        with values in [0, 15]. Scales and minima are kept in float16.
        """

    @abstractmethod
    def use_threads(self, count: int) -> None:
        """From now on the operations run on `count` threads of this process.

        The compiled kernels have a pool of their own and leave torch one thread: the idle threads
        of torch's pool spin, and would take the cores that the kernels need.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] / rms(x) * weight [H]."""

    @abstractmethod
    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual` becomes x + residual (in place); gives its norm. Both [T, H], same dtype."""

    @abstractmethod
    def rope_and_cache(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        q_norm_weight: Tensor | None = None,
        k_norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        neox: bool = True,
    ) -> None:
        """Norm and rotate q and k in place, then write k and v to their slots.

        q [T, Hq, D], k and v [T, Hk, D], with any stride between tokens; positions and
        slot_mapping int64 [T]; cos_sin float32 [max_position, rotary_dim], cosines in the first
        half of a row, sines in the second; None: no rotation. The first rotary_dim of D values are
        rotated, as two halves (neox) or as neighbours. Caches [num_blocks, Hk, block_size, D];
        slot = block * block_size + offset; a slot of -1 writes nothing. With norm weights [D] each
        head is RMS-normed before it is rotated.
        """

    @abstractmethod
    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        query_start_loc: Tensor,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of ragged queries over paged keys and values; gives [T, Hq, D].

        q [T, Hq, D], any stride between tokens; caches [num_blocks, Hk, block_size, D];
        block_tables int32 [S, max_blocks]; seq_lens int32 [S], tokens in the cache, those of this
        step included; query_start_loc int32 [S + 1]: sequence s owns the queries
        [query_start_loc[s], query_start_loc[s + 1]), which are its last tokens.

        A query sees itself and the sliding_window - 1 tokens before it (0: all). Scores are
        scale * q.k, then soft_cap * tanh(score / soft_cap), then + slope of the head [Hq] *
        (key position - query position). sinks [Hq] are logits that take part in the softmax and
        bring no value.
        """

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2I] -> silu(first half) * second half, [T, I]."""

    @abstractmethod
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """x [T, 2I] -> gelu(first half) * second half; approximate: "none" or "tanh"."""
