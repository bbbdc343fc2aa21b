"""The kernels' interface: arguments, results and side effects of each operation.

T is the number of tokens of a step, H the hidden size, D the head size, Hq and Hk the number of
query and of key/value heads (Hq is a multiple of Hk). Activations are float32, bfloat16 or float16;
norms, softmax and sums are computed in float32. Wrong shapes, dtypes, positions, slots or block ids
raise ValueError before anything is written. `kernels.layers` defines arguments other than tensors,
and `kernels.linear_factory` packs weights.
"""

from __future__ import annotations

import mmap
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.attention_args import AttentionArgs, MlaArgs
from kernels.compiled_decoder import (
    AuxStateBuffer,
    CompiledDecoder,
    DecoderLayer,
    DecoderShape,
    KVCache,
    LatentLayer,
    SharedBlock,
    StateLayer,
)
from kernels.layers import (
    NO_NORM,
    SLICE_ROWS,
    Activation,
    ActivationSpec,
    AttentionWeights,
    ExpertLayers,
    HeadNormWeights,
    IntegerRows,
    LinearLayer,
    MixtureOfExperts,
    MlpWeights,
    NormWeights,
    PerHeadLinear,
    activation,
)
from kernels.linear_factory import LinearFactory
from kernels.logit_edits import LogitEdits, TopLogprobs
from kernels.lora import (
    LoraLayout,
    LoraSegment,
    LoraSlots,
    LoraTarget,
    LoraTemplate,
    LoraWeights,
    MoeLoraMapping,
    PackedLora,
    TorchLora,
    add_lora_torch,
)
from kernels.moe import SequentialMoe
from kernels.ranks import Exchange, RankGroup
from kernels.sparse_index import select_tokens
from kernels.ssm import ScanInputs, ScanWeights, StateOperations, StateRows

__all__ = [
    "NO_NORM",
    "SLICE_ROWS",
    "ActivationSpec",
    "AttentionArgs",
    "AttentionWeights",
    "AuxStateBuffer",
    "CompiledDecoder",
    "DecoderLayer",
    "DecoderShape",
    "ExpertLayers",
    "HeadNormWeights",
    "IntegerRows",
    "KernelSet",
    "LinearLayer",
    "MixtureOfExperts",
    "MlaArgs",
    "MlpWeights",
    "NormWeights",
    "PerHeadLinear",
    "RankGroup",
    "ScanInputs",
    "ScanWeights",
    "StateRows",
]


class KernelSet(LinearFactory, StateOperations):
    """An implementation of all operations."""

    name: str
    why: str
    device: torch.device = torch.device("cpu")
    """The device on which the operations expect their tensors."""

    batch_invariant: bool = False
    """Whether a row's results have the same bits whatever the batch's other rows are."""

    version: str = ""
    """Identifies the build if builds of the same name may compute different bits."""

    attention_backend: str = ""
    """The backend of its attention, by its name in `kernels.attention`; "" for its own."""
    has_own_attention: bool = True
    """Whether its attention is the default; otherwise the default backend is chosen."""
    compute_capability: int | None = None
    """Compute capability of an NVIDIA GPU, such as 90 for 9.0; None for other devices."""
    fuses_experts: bool = False
    """Whether `route` and `fused_experts` are available."""
    edits: LogitEdits | None = None
    """Edits logits before a token is chosen; None to use torch."""

    def rank_memory_bytes(self, size: int) -> int:
        """Return the bytes of memory that a group of `size` ranks shares; 0 without support for
        ranks.
        """
        return 0

    def join_ranks(
        self,
        memory: mmap.mmap,
        rank: int,
        size: int,
        timeout_s: float,
        exchange: Exchange | None = None,
    ) -> RankGroup:
        """Return this process's member of a rank group.

        Args:
            memory: `rank_memory_bytes` bytes, mapped by all ranks, initially zero.
            timeout_s: timeout of a gather.
            exchange: transfers data between ranks on several machines; None for shared memory.

        Raises ValueError without support for ranks, and for more ranks than supported.
        """
        raise ValueError(f"{self.name} kernels have no ranks")

    def activation_dtype(self, weights: torch.dtype) -> torch.dtype:
        """Return the preferred dtype of hidden states, for weights of this dtype."""
        return torch.float32

    def use_threads(
        self, count: int, cpus: Sequence[int] | None = None, *, spread: bool = True
    ) -> None:
        """Run the operations on `count` threads of this process from now on.

        With `cpus` each thread is bound to one of them, the calling thread to the first, so that
        two threads never share a core while another is idle. This suits a process dedicated to a
        model. The compiled kernels have their own pool and leave torch one thread, since the idle
        threads of torch's pool spin on cores that the kernels need. Without `cpus` they distribute
        their threads if there is a CPU for each, unless `spread=False`. Kernels without their own
        pool set torch's number of threads and bind none.

        Raises ValueError unless count is at least 1 and this process may run on all of `cpus`.
        """
        if count < 1:
            raise ValueError(f"the number of threads must be at least 1, got {count}")
        torch.set_num_threads(count)

    def num_threads(self) -> int:
        """Return the number of threads of the operations."""
        return torch.get_num_threads()

    def head_linears(self, layers: Sequence[LinearLayer]) -> PerHeadLinear:
        """Return a linear layer for each head. The layers must belong to this set and have equal
        shapes.
        """
        return PerHeadLinear(layers)

    def compile_experts(self, experts: ExpertLayers) -> MixtureOfExperts:
        """Return a mixture of experts that runs in one call if this set supports it, else expert by
        expert.

        The linear layers must belong to this set. Raises ValueError for inconsistent layers.
        """
        return SequentialMoe(self, experts)

    def compile_decoder(
        self,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        caches: Sequence[KVCache | None],
        groups: Sequence[int],
        final_norm: NormWeights,
        states: Sequence[StateLayer | None] = (),
        latents: Sequence[LatentLayer | None] = (),
        blocks: Sequence[SharedBlock | None] = (),
        kv_ranks: RankGroup | None = None,
    ) -> CompiledDecoder | None:
        """Return a decoder that runs all layers in one call; None if this set has none.

        `caches` and `groups` are per layer. A group selects the slots and block tables of the
        layer, since layers may store their tokens in different ones. A layer without a cache has no
        attention. `states`, `latents` and `blocks` are per layer, too; () for none. `kv_ranks`: see
        `AttentionArgs.ranks`.

        Its results equal those of the separate operations bitwise, except for LayerNorm, which is
        close to torch's. The linear layers and experts must belong to this set. Raises ValueError
        for inconsistent weights.
        """
        return None

    def pack_lora(self, lora: LoraWeights) -> PackedLora:
        """Return an adapter's addition to one linear layer, copied to memory of these kernels.

        Raises ValueError for inconsistent tensors.
        """
        return TorchLora(lora, self.device)

    def lora_template(self, plans: Sequence[LoraLayout], dtype: torch.dtype) -> LoraTemplate | None:
        """Return a packer of whole adapters from a file of `dtype`; None if not supported."""
        return None

    def add_lora(self, y: Tensor, x: Tensor, uses: Sequence[LoraSegment]) -> None:
        """Add the adapters' outputs to rows of y [T, N], a linear layer's result for x [T, K].

        Each of `uses` lists its rows, int64 and ascending, without overlaps. The adapters must be
        packed by this set. Other rows don't change, and a row's result doesn't depend on the
        others.
        """
        add_lora_torch(y, x, uses)

    def lora_slots(
        self,
        targets: Mapping[LoraTarget, int],
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        experts: int = 0,
    ) -> LoraSlots | None:
        """Return slots for adapters in recorded steps; None if not supported.

        Args:
            targets: the linear layers that adapters may change, with their maximum number of
                slices.
            max_rank: maximum rank of a slice.
            dtype: dtype of the rows.
            experts: number of experts of each mixture, 0 for none.
        """
        return None

    @abstractmethod
    def new_kv_cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros for a KV cache, in memory that is fast for the kernels.

        Pages are mapped on their first write: an idle cache costs nothing.
        """

    def map_pages(self, cache: Tensor) -> None:
        """Map the pages of a contiguous part of a KV cache now, without changing it.

        May run in another thread while the cache is in use, and may do nothing.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H] / rms(x) * weight [H]."""

    @abstractmethod
    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Set `residual` to x + residual in place; returns its norm. Both [T, H], same dtype."""

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
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """Norm and rotate q and k in place, then write k and v to their slots.

        q [T, Hq, D], k and v [T, Hk, D], with any stride between tokens; Hq may be 0. positions and
        slot_mapping int64 [T]. cos_sin float32 [max_position, rotary_dim] has cosines in the first
        half of a row and sines in the second; None for no rotation. The first rotary_dim of D
        values are rotated, as two halves (neox) or as adjacent pairs. Caches are [num_blocks, Hk,
        block_size, D]; slot = block * block_size + offset, and a slot of -1 writes nothing. With
        norm weights [D] each head is RMS-normed before rotation. int8 caches require key_scales and
        value_scales float32 [num_blocks, Hk, block_size], which receive a scale per token and head.
        fp8 caches may have scales [Hk], by which a head's keys or values are divided.
        """

    @abstractmethod
    def paged_attention(self, args: AttentionArgs) -> Tensor:
        """Causal attention of ragged queries over paged keys and values; returns [T, Hq, D].

        int8 and fp8 caches have scales as in `rope_and_cache`.
        """

    def encoder_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        length: int,
        *,
        reach: int = 0,
        round_inputs: bool = False,
    ) -> Tensor:
        """Attention in which tokens also attend to later ones of their sequence; returns [T, H, D].

        Args:
            q, k, v: [T, H, D], with any stride between tokens.
            length: number of tokens of each sequence; the sequences are concatenated.
            reach: maximum distance of tokens that are attended to; 0 for no limit.
            round_inputs: allow rounding queries, keys, values and attention weights to bfloat16 if
                that is faster.
        """
        mask = None
        if reach and length > reach + 1:
            positions = torch.arange(length, device=q.device)
            mask = (positions[None, :] - positions[:, None]).abs() <= reach
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(0, 1)

    def select_tokens(
        self, queries: Tensor, factors: Tensor, keys: Tensor, visible: Tensor, top_k: int
    ) -> Tensor:
        """Return the `top_k` tokens that each query attends to, int64 [n, top_k], ascending. See
        `select_tokens` in `kernels.sparse_index`.
        """
        return select_tokens(queries, factors, keys, visible, top_k)

    def rope_and_cache_mla(
        self,
        q: Tensor,
        latents: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        cache: Tensor,
        slot_mapping: Tensor,
        neox: bool = True,
        scales: Tensor | None = None,
    ) -> None:
        """Rotate q [T, Hq, D] and latents [T, 1, D] in place, then write the latents to their
        slots.

        cache [num_blocks, 1, block_size, D]; `scales` of an int8 cache float32 [num_blocks, 1,
        block_size]. The other arguments are those of `rope_and_cache`, which this default calls
        with the latents as both keys and values. Sets that write both at once override it.
        """
        self.rope_and_cache(
            q,
            latents,
            latents,
            positions,
            cos_sin,
            cache,
            cache,
            slot_mapping,
            neox=neox,
            key_scales=scales,
            value_scales=scales,
        )

    def mla_attention(self, args: MlaArgs) -> Tensor:
        """Causal attention of ragged queries over paged latents; returns [T, Hq, latent], which may
        be strided.
        """
        result = self.paged_attention(args.of_whole_values())[..., -args.latent :]
        return result if args.out is None else args.out.copy_(result)

    def activation(self, name: str) -> Activation:
        """Return an activation without a gate. Raises KeyError for an unknown one."""
        return activation(name)

    @abstractmethod
    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2I] -> silu(first half) * second half, [T, I]."""

    @abstractmethod
    def gelu_and_mul(self, x: Tensor, approximate: str = "none") -> Tensor:
        """x [T, 2I] -> gelu(first half) * second half; approximate: "none" or "tanh"."""

    def sigmoid_and_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """gate and x [T, N] -> sigmoid(gate) * x."""
        return torch.sigmoid(gate) * x

    def route(
        self,
        scores: Tensor,
        top_k: int,
        *,
        softmax_first: bool = True,
        renormalize: bool = True,
        sigmoid: bool = False,
        choice_bias: Tensor | None = None,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        group_best: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token: weights float32 and ids int32, [T, top_k], best first.

        scores [T, E]. Weights are a softmax over all experts, renormalized over the chosen or not,
        or a softmax over the chosen alone (`softmax_first=False`); or `sigmoid`s, renormalized or
        not. `choice_bias`, float32 [E], is added to the scores only to choose experts; `scale`
        multiplies weights. `groups`, `top_groups` and `group_best` are those of `ExpertLayers`.
        """
        raise NotImplementedError(f"{self.name} kernels route no experts")

    def fused_experts(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weights: Tensor,
        ids: Tensor,
        *,
        activation: str = "silu",
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        lora: MoeLoraMapping | None = None,
    ) -> Tensor:
        """Return each token's experts, weighted and summed, [T, H].

        x [T, H]; gate_up [E, 2 I, H]; down [E, H, I]; weights and ids as returned by `route`;
        biases [E, 2 I] and [E, H]. `activation` is "silu", "gelu" or "gelu_tanh". `lora` adds the
        rows' adapters.
        """
        raise NotImplementedError(f"{self.name} kernels fuse no experts")

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """Return the first maximum of each row of float32 logits [R, vocab], int64 [R].

        -1 if the maximum isn't finite or a logit is NaN.
        """

    def top_logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> TopLogprobs | None:
        """Return log probabilities of tokens int64 [R] and of the k most likely of float32 logits
        [R, vocab]; k at most vocab. None if not supported.
        """
        return None

    @abstractmethod
    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniforms: Tensor,
    ) -> Tensor:
        """Return a token drawn from each row of float32 logits [R, vocab], int64 [R].

        temperature float32 [R] (0 for the most likely token); top_k int64 [R], at least 1; top_p
        and min_p float64 [R] in (0, 1] and [0, 1]; uniforms float64 [R] in [0, 1). With tokens
        ordered by (logit descending, id ascending), min-p keeps those at least min_p times as
        likely as the most likely one, top-k the first top_k, top-p the shortest prefix with top_p
        of the remaining probability. A token is drawn from those left by inverse CDF in the order
        of ids. -1 if the largest logit isn't finite or one is NaN.
        """
