"""Why a prompt found nothing in the cache.

Every reason follows from what its own namespace has sent. None tells that the same tokens are known
in another one: a number that counts such cases answers the guesses of whoever can read it.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.kv_cache.hashing import BlockHashes

CACHING_OFF = "caching_off"
#: Logprobs or pooled vectors of all prompt tokens are wanted, so all are computed.
ALL_TOKENS_NEEDED = "all_tokens_needed"
SHORTER_THAN_A_BLOCK = "shorter_than_a_block"
EVICTED = "evicted"
NO_SHARED_PREFIX = "no_shared_prefix"

_REMEMBERED = 8192


class ColdStarts:
    """Remembers the first blocks of the last prompts that started cold.

    Bounded memory: a prompt whose first block is remembered was cached once in this namespace, so
    it has been evicted since. What was forgotten counts as never shared.
    """

    def __init__(self, block_size: int, remembered: int = _REMEMBERED) -> None:
        self._block_size = block_size
        self._remembered = remembered
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def reason(self, token_ids: list[int], hashes: BlockHashes) -> str:
        """Why nothing was found for a sequence; its first block is remembered from now on.

        Its hashes must be up to date.
        """
        if len(token_ids) <= self._block_size:
            # The last token is always computed, so a prompt of one block can't hit it either.
            return SHORTER_THAN_A_BLOCK
        first = hashes.values[0]
        reason = EVICTED if first in self._hashes else NO_SHARED_PREFIX
        self._hashes[first] = None
        self._hashes.move_to_end(first)
        if len(self._hashes) > self._remembered:
            self._hashes.popitem(last=False)
        return reason
