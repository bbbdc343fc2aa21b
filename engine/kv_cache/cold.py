"""Why a prompt found nothing in the cache. For operators: a client mustn't learn it, since
`ANOTHER_NAMESPACE` says what somebody else has sent.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.kv_cache.hashing import BlockHashes

CACHING_OFF = "caching_off"
#: Logprobs or pooled vectors of all prompt tokens are wanted, so all are computed.
ALL_TOKENS_NEEDED = "all_tokens_needed"
SHORTER_THAN_A_BLOCK = "shorter_than_a_block"
EVICTED = "evicted"
ANOTHER_NAMESPACE = "another_namespace"
NO_SHARED_PREFIX = "no_shared_prefix"

_REMEMBERED = 8192


class ColdStarts:
    """Remembers the first blocks of the last prompts that started cold.

    Bounded memory, and two more hashes of one block a cold prompt: a prompt whose first block is
    remembered was cached once, so it has been evicted since; one that is known by its tokens alone
    was cached for another tenant, salt or adapter. What was forgotten counts as never shared.
    """

    def __init__(self, block_size: int, remembered: int = _REMEMBERED) -> None:
        self._block_size = block_size
        self._remembered = remembered
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self._contents: OrderedDict[bytes, None] = OrderedDict()

    def reason(self, token_ids: list[int], hashes: BlockHashes) -> str:
        """Why nothing was found for a sequence; its first block is remembered from now on.

        Its hashes must be up to date.
        """
        if len(token_ids) <= self._block_size:
            # The last token is always computed, so a prompt of one block can't hit it either.
            return SHORTER_THAN_A_BLOCK
        content = first = hashes.values[0]
        if hashes.scope:
            content = hashes.unscoped(token_ids, self._block_size)
        if first in self._hashes:
            reason = EVICTED
        elif content in self._contents:
            reason = ANOTHER_NAMESPACE
        else:
            reason = NO_SHARED_PREFIX
        self._remember(self._hashes, first)
        self._remember(self._contents, content)
        return reason

    def _remember(self, known: OrderedDict[bytes, None], key: bytes) -> None:
        known[key] = None
        known.move_to_end(key)
        if len(known) > self._remembered:
            known.popitem(last=False)
