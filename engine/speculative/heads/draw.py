"""`HeadDrawer`: drafts of some sequences, drawn one behind the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.sampling.sampler import Sampler
from engine.sampling.state import SequenceSampling
from engine.sampling.transfer import to_device
from engine.speculative.heads.heads import Rounds


class HeadDrawer:
    """Draws from heads' logits as the model draws from its own: with each sequence's parameters
    and, at each place, the same random number.
    """

    def __init__(self, sampler: Sampler, ends: Iterable[int], device: torch.device) -> None:
        """`sampler`: nobody else's. `ends`: tokens behind which no draft stands. `device`: of the
        heads.
        """
        self._sampler, self._ends, self._device = sampler, frozenset(ends), device

    @torch.inference_mode()
    def draw(
        self,
        rounds: Rounds,
        tokens: list[int],
        states: list[SequenceSampling],
        counts: list[int],
    ) -> list[list[int]]:
        """At most `counts[i]` drafts of row i.

        Args:
            rounds: of the heads, over n rows.
            tokens: [n] the newest ones.
            states: of the sequences, with these tokens; they get the drafts.
            counts: [n], >= 1, at most as many as the heads have.
        """
        drafts: list[list[int]] = [[] for _ in counts]
        rows = list(range(len(counts)))
        for _ in range(max(counts)):
            newest = torch.tensor([(drafts[row] or [tokens[row]])[-1] for row in rows])
            logits = rounds.logits(to_device(newest, self._device))
            drawn = self._sampler.sample(logits, [states[row] for row in rows]).token_ids.tolist()
            going = []
            for at, (row, token) in enumerate(zip(rows, drawn, strict=True)):
                if token < 0:  # nothing can be drawn
                    continue
                drafts[row].append(token)
                states[row].output_token_ids.append(token)
                if len(drafts[row]) < counts[row] and token not in self._ends:
                    going.append(at)
            if not going:
                break
            if len(going) < len(rows):
                rows = [rows[at] for at in going]
                rounds.keep(going)
        return drafts
