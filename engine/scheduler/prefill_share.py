"""How many prompt tokens share a step with decodes.

Each of them makes the step longer, and every stream that decodes waits for it; too few, and prompts
wait instead. Both waits grow with the load, so the share does too.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The part of `most` that prompts always get, and no fewer tokens than these.
_LEAST_PART, _LEAST_TOKENS = 6, 64
#: Prompt tokens that wait are computed in about as many steps, if the most allows it.
_STEPS_FOR_ALL = 32


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """Prompt tokens of one step in which others decode.

    Attributes:
        most: never more, which bounds how long a step takes.
        full_at: with so many sequences that decode in a step, prompts get `most`; with fewer their
            part of it, at least a sixth and 64 tokens. 0: always `most`.
    """

    most: int
    full_at: int = 0

    def of(self, num_decodes: int, num_waiting_tokens: int) -> int:
        """The share of a step.

        Args:
            num_decodes: sequences that decode in it.
            num_waiting_tokens: of prompts that are still to be computed, all together.
        """
        if not self.full_at:
            return self.most
        by_decodes = self.most * num_decodes // self.full_at
        by_prompts = num_waiting_tokens // _STEPS_FOR_ALL
        least = max(_LEAST_TOKENS, self.most // _LEAST_PART)
        return min(self.most, max(by_decodes, by_prompts, least))
