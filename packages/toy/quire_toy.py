"""A device that computes in numpy: the example of docs/extending/device.md."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.devices import CacheRequirements, Device, RunnerInputs
from engine.sampling.sampler import Sampler
from engine.worker.interface import Runner
from engine.worker.model_runner import ModelRunner
from kernels import KernelSet
from kernels.interface import AttentionArgs
from kernels.reference import ReferenceKernels

Array = NDArray[np.float32]


class ToyKernels(ReferenceKernels):
    """Norms, the gated activation and attention in numpy; everything else is the reference's."""

    name = "toy"

    def __init__(self) -> None:
        super().__init__(why="the toy device computes in numpy")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = x.float().numpy()
        scale = 1.0 / np.sqrt(np.mean(values * values, axis=-1, keepdims=True) + np.float32(eps))
        return torch.from_numpy(values * scale * weight.float().numpy()).to(x.dtype)

    def fused_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = np.split(x.float().numpy(), 2, axis=-1)
        return torch.from_numpy(gate / (1 + np.exp(-gate)) * up).to(x.dtype)

    def paged_attention(self, args: AttentionArgs) -> Tensor:
        if args.alibi_slopes is not None or args.sinks is not None or args.sparse is not None:
            return super().paged_attention(args)
        out = torch.empty(args.q.shape, dtype=args.q.dtype) if args.out is None else args.out
        starts, lengths = args.query_start_loc.tolist(), args.seq_lens.tolist()
        for sequence, length in enumerate(lengths):
            begin, end = starts[sequence], starts[sequence + 1]
            # Positions count from the sequence's beginning; its queries are its last tokens. Blocks
            # before the window of the first query may belong to other sequences by now.
            window = args.sliding_window or length
            first_seen = max(0, length - (end - begin) - window + 1)
            tokens = np.arange(first_seen, length)
            block_size = args.key_cache.shape[2]
            blocks = args.block_tables[sequence].long()[tokens // block_size]
            slots = torch.from_numpy(tokens % block_size)
            keys = args.key_cache[blocks, :, slots].float().numpy()
            values = args.value_cache[blocks, :, slots].float().numpy()
            queries = np.arange(length - (end - begin), length)
            distance = queries[:, None] - tokens[None, :]
            visible = (distance >= 0) & (distance < window)
            mixed = _attend(args.q[begin:end].float().numpy(), keys, values, visible, args)
            out[begin:end] = torch.from_numpy(mixed).to(out.dtype)
        return out


def _attend(
    q: Array, keys: Array, values: Array, visible: NDArray[np.bool_], args: AttentionArgs
) -> Array:
    """Softmax attention.

    Args:
        q: [queries, Hq, D].
        keys, values: [tokens, Hk, D].
        visible: [queries, tokens].

    Returns [queries, Hq, D].
    """
    grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[2])
    scores = np.einsum("qhgd,thd->hgqt", grouped, keys) * np.float32(args.scale)
    if args.soft_cap > 0:
        scores = args.soft_cap * np.tanh(scores / args.soft_cap)
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hgqt,thd->qhgd", weights, values).reshape(q.shape)


class ToyDevice(Device):
    """This machine's CPU, by numpy."""

    name: ClassVar[str] = "toy"
    token_budget: ClassVar[int] = 64

    @classmethod
    def unavailable_reason(cls) -> str:
        return ""

    def make_kernels(self) -> KernelSet:
        return ToyKernels()

    def num_blocks(self, need: CacheRequirements) -> int:
        return self.config.num_gpu_blocks_override or 128

    def make_runner(self, parts: RunnerInputs) -> Runner:
        sampler = Sampler(parts.loaded.eos_token_ids, None)
        return ModelRunner(parts.loaded.model, parts.batch, sampler, masks=parts.masks)


class PhasedDevice(ToyDevice):
    """A device whose steps are prompts or decodes, whose prompts can't be split, and whose prompts
    can't start with cached blocks.
    """

    name: ClassVar[str] = "phased"
    mixes: ClassVar[bool] = False
    runs_whole_prompts: ClassVar[bool] = True
    caches_prefixes: bool = False
