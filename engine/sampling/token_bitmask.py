"""Grammar masks on logits: tokens that a grammar forbids get probability 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.logit_edits import LogitEdits
from kernels.tensors import to_device

NEVER = float("-inf")


@dataclass(slots=True)
class TokenBitmask:
    """Grammar masks for some rows of the logits.

    Attributes:
        rows: [n] rows of the logits.
        bits: int32 [n, words]; bit t % 32 of word t // 32 is set if token t is allowed. At least as
            many bits as the vocabulary has tokens.
        eos_only: indices into `rows` whose allowed tokens override all other constraints.
    """

    rows: list[int]
    bits: NDArray[np.int32]
    eos_only: list[int]

    def of(self, rows: Sequence[int]) -> TokenBitmask | None:
        """Return the masks of `rows`, indexed by position there; None if there are none."""
        index_by_row = {row: index for index, row in enumerate(rows)}
        remaining = [n for n, row in enumerate(self.rows) if row in index_by_row]
        if not remaining:
            return None
        forced = set(self.eos_only)
        return TokenBitmask(
            rows=[index_by_row[self.rows[n]] for n in remaining],
            bits=self.bits[remaining],
            eos_only=[index for index, n in enumerate(remaining) if n in forced],
        )

    def apply(self, logits: Tensor, edits: LogitEdits | None = None) -> None:
        """Set forbidden tokens of `logits` (float32 [rows, vocab]) to -inf, in place.

        `edits`: the kernels that do it; None: torch.
        """
        if edits is not None:
            self._apply_by(edits, logits)
            return
        forbidden = unpack_bits(~self.bits, logits.shape[-1], logits.device)
        if self.rows == list(range(len(logits))):
            self._fill(logits, forbidden)
            return
        index = torch.tensor(self.rows, dtype=torch.int64, device=logits.device)
        chosen = logits[index]
        self._fill(chosen, forbidden)
        logits[index] = chosen

    def _fill(self, chosen: Tensor, forbidden: Tensor) -> None:
        """`apply` to logits that contain only the masked rows."""
        if self.eos_only:
            eos_ids = torch.tensor(self.eos_only, dtype=torch.int64, device=chosen.device)
            chosen[eos_ids] = chosen[eos_ids].masked_fill(~forbidden[eos_ids], 0.0)
        chosen.masked_fill_(forbidden, NEVER)

    def _apply_by(self, edits: LogitEdits, logits: Tensor) -> None:
        device, forced = logits.device, None
        if self.eos_only:
            flags = torch.zeros(len(self.rows), dtype=torch.bool)
            flags[self.eos_only] = True
            forced = to_device(flags, device)
        rows = to_device(torch.tensor(self.rows, dtype=torch.int64), device)
        bits = to_device(torch.from_numpy(np.ascontiguousarray(self.bits)), device)
        edits.apply_bitmask(logits, rows, bits, forced)


def pack_bits(allowed: Sequence[Sequence[int]], vocab_size: int) -> NDArray[np.int32]:
    """Pack each row's tokens into bits [rows, words]; ids outside any vocabulary are dropped."""
    flags = np.zeros((len(allowed), -(-vocab_size // 32) * 32), dtype=np.bool_)
    for row, tokens in zip(flags, allowed, strict=True):
        ids = np.asarray(tokens, dtype=np.int64)
        row[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def unpack_bits(bits: NDArray[np.int32], vocab_size: int, device: torch.device) -> Tensor:
    """Unpack bits to bool [rows, vocab_size]: on the host by numpy, else on the device."""
    if device == torch.device("cpu"):
        flat = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flat.view(np.bool_))
    return unpack_on_device(torch.from_numpy(bits).to(device), vocab_size)


def unpack_on_device(bits: Tensor, vocab_size: int) -> Tensor:
    """Unpack int32 [rows, words] to bool [rows, vocab_size] on their device."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    spread = (bits[:, :, None] >> shifts) & 1
    return spread.flatten(1)[:, :vocab_size].bool()
