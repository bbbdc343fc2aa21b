"""How many prompt tokens share a step with decodes.

Each of them makes the step longer, and every stream that decodes waits for it; too few, and prompts
wait instead. Both waits grow with the load, so the share does too.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A prompt that starts beside decodes counts as so many tokens at least: of one that was found in
#: the cache few are left to compute, but they read all of it, and the worker is told of it whole.
LEAST_OF_A_START = 8
#: Prompt tokens that wait are computed in about as many steps, if the most allows it.
_STEPS_FOR_ALL = 32
#: Sequences that decode beside which `PrefillShare.least` is meant; beside more it grows with them.
_LEAST_BESIDE = 9


@dataclass(frozen=True, slots=True)
class PrefillShare:
    """Prompt tokens of one step in which others decode.

    Attributes:
        most: bounds how long a step takes, except that each sequence that decodes brings prompts
            some tokens all the same: see `least`.
        full_at: with so many sequences that decode in a step, prompts get `most`; with fewer their
            part of it, though they fill the step up to `least`. 0: always `most`.
        least: tokens of a step, those that decode included, where up to 9 sequences decode; few
            more take nearly as long as few less, for products go by whole tiles of rows. And 8
            (with 72) for each that decodes, be it more than `most`: a request brings some prompt
            tokens for each that it decodes, and if a step takes in fewer, prompts wait the longer
            the more wait, for the decodes of others who came before them.
        reach: attention reads all that stands before a token, and so many tokens of this context
            take as long as the token itself: a prompt's later tokens count for more than its first
            ones, and so does a start that was found in the cache. But `least` are tokens, wherever
            they stand. 0: context counts for nothing.
        whole: tokens of a whole step, of prompts and of those that decode, that take about as long
            as `most` may; `Turns` holds steps to them while others are about. 0: it doesn't.
    """

    most: int
    full_at: int = 0
    least: int = 72
    reach: int = 0
    whole: int = 0

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
        wanted = min(self.most, max(by_decodes, by_prompts))
        return max(wanted, self.least_of(num_decodes))

    def least_of(self, num_decodes: int) -> int:
        """Prompt tokens of a step that go beside so many decodes, whatever they take."""
        if not self.full_at:
            return 0
        filled = max(self.least - num_decodes, 1)
        sustained = self.least * num_decodes // _LEAST_BESIDE - num_decodes
        return max(min(self.most, filled), sustained)

    def chunk(self, wanted: int, left: int) -> int:
        """Tokens of a prompt in a step that has room for some of them.

        Where the share follows the load, a prompt goes in parts of one size, and up to an eighth
        more than there's room for where that spares a step: one for the last few tokens alone
        takes time as well.

        Args:
            wanted: tokens of the prompt that are still to be computed.
            left: of the step's share.
        """
        if wanted <= left or left <= 0 or not self.full_at:
            return max(0, min(wanted, left))
        steps = -(-(8 * wanted - left) // (8 * left))
        return -(-wanted // steps)
