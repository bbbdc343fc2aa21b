"""How many prompt tokens share a step with decodes.

Each of them makes the step longer, and every stream that decodes waits for it; too few, and prompts
wait instead. Both waits grow with the load, so the share does too.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Fewer prompt tokens than this would waste the weights that a step reads anyway.
_LEAST = 48
#: Prompt tokens that wait are computed in about as many steps, if the most allows it.
_STEPS_FOR_ALL = 32


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """Prompt tokens of one step in which others decode.

    Attributes:
        most: never more, which bounds how long a step takes.
        per_decode: for each sequence that decodes. In a balanced load prompts come as fast as
            streams end, so a step needs about (prompt length / output length) prompt tokens a
            decode. 0: always `most`.
    """

    most: int
    per_decode: int = 0

    def of(self, num_decodes: int, num_waiting_tokens: int) -> int:
        """The share of a step.

        Args:
            num_decodes: sequences that decode in it.
            num_waiting_tokens: of prompts that are still to be computed, all together.
        """
        if not self.per_decode:
            return self.most
        wanted = max(self.per_decode * num_decodes, num_waiting_tokens // _STEPS_FOR_ALL)
        return min(self.most, max(_LEAST, wanted))
