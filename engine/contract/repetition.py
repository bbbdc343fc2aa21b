"""`RepetitionDetectionParams`: when an output goes round in circles. Torch-free."""

from __future__ import annotations

import msgspec

from engine.contract.checks import integer

MAX_PATTERN = 256


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """End an output that goes round in circles.

    It ends once its last tokens are some pattern of `min_pattern_size` to `max_pattern_size` tokens
    for the `min_count`-th time in a row.

    Attributes:
        max_pattern_size: [0, 256]; 0 switches it off.
        min_pattern_size: [0, max_pattern_size]; 0 means 1.
        min_count: >= 2, unless it is off.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        name = "repetition_detection"
        integer(f"{name}.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN)
        integer(f"{name}.min_pattern_size", self.min_pattern_size, 0, self.max_pattern_size)
        integer(f"{name}.min_count", self.min_count, 2 if self.max_pattern_size else 0)

    def found_in(self, token_ids: list[int], num_output_tokens: int) -> bool:
        """Whether the output (the last `num_output_tokens` of `token_ids`) ends in a circle."""
        for size in range(self.min_pattern_size or 1, self.max_pattern_size + 1):
            whole = size * self.min_count
            if whole > num_output_tokens:
                return False
            # Periodic means equal to itself one pattern ago. The last token alone rules most out.
            if (
                token_ids[-1] == token_ids[-1 - size]
                and token_ids[-whole:-size] == token_ids[-whole + size :]
            ):
                return True
        return False
