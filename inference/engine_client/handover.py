"""`PrefillPlanner`: decides which prompts are computed, or their media encoded, by another replica
than the one that decodes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.contract.kv_transfer_config import EC_PRODUCER, KV_PRODUCER
from engine.contract.messages import Heartbeat
from inference.engine_client.fleet import Replica, choose_replica
from inference.engine_client.flight import InFlightRequest


class PrefillPlanner:
    """Sends a prompt to a prefill replica if the replica that decodes it would need several steps
    to compute it, judging by what this gateway has sent there before. One with media goes to a
    replica that encodes.
    """

    def __init__(self) -> None:
        #: Prompt prefix -> the incarnation that last answered it, in LRU order.
        self._prefixes: OrderedDict[bytes, str] = OrderedDict()
        #: Media that were encoded for other replicas, by reader, adapter, namespace and digest, in
        #: LRU order.
        self._media: OrderedDict[bytes, None] = OrderedDict()

    def choose(
        self, flight: InFlightRequest, replicas: Sequence[Replica], decode: Replica, slack: int
    ) -> Replica | None:
        """The replica that first encodes a flight's media, or then computes its prompt, for
        `decode`; None if `decode` does.

        `slack`: how many more requests than `decode` a prefill replica may have.
        """
        handover = decode.heartbeat.kv_handover
        if handover is None or handover.only_prepares or not flight.can_be_prefilled:
            return None
        encodes = bool(flight.request.media) and handover.loads_encodings and not flight.encoded
        producers, encoders = [], []
        for replica in replicas:
            theirs = replica.heartbeat.kv_handover
            is_available = replica.ready and not (replica.silent or replica.heartbeat.paused)
            if theirs is None or theirs.key_space != handover.key_space or not is_available:
                continue
            if theirs.role == KV_PRODUCER:
                producers.append(replica)
            elif theirs.ec_role == EC_PRODUCER and encodes:
                encoders.append(replica)
        encoders = [encoder for encoder in encoders if encoder.load <= decode.load + slack]
        # What encoders have in their memory is read by the replica that was told of it alone.
        reader = decode.heartbeat.incarnation if any(e.kv_address for e in encoders) else ""
        if encoders and self._record_media(flight, decode.heartbeat, reader):
            return min(encoders, key=lambda encoder: encoder.load)
        if not producers:
            return None
        num_new_tokens = self._record_prefixes(flight, handover.step_tokens, decode.heartbeat)
        if num_new_tokens <= handover.step_tokens:
            return None
        producer = choose_replica(
            producers, flight.request.prefix_key, slack, flight.request.adapter_digest
        )
        if producer is None or producer.load > decode.load + slack:
            return None
        return producer

    def _record_media(self, flight: InFlightRequest, beat: Heartbeat, reader: str) -> bool:
        """Whether a prompt has media that weren't encoded before for `reader`; "": for all. As many
        are remembered as there are tokens in a replica's KV cache, at most.
        """
        is_new, request = False, flight.request
        scope = hashlib.sha256(
            f"{reader} {request.adapter_digest} {request.cache_namespace}".encode()
        )
        for item in request.media:
            name = scope.digest() + item.digest
            is_new = is_new or name not in self._media
            self._media[name] = None
            self._media.move_to_end(name)
        while len(self._media) > max(1, beat.model.kv_capacity_tokens):
            self._media.popitem(last=False)
        return is_new

    def _record_prefixes(self, flight: InFlightRequest, stride: int, beat: Heartbeat) -> int:
        """Number of a prompt's tokens after the longest prefix that a replica has answered.

        The remembered prefixes are limited to what its KV cache holds, in strides.
        """
        token_ids, key = flight.request.prompt_token_ids, flight.request.prefix_key
        num_cached, is_cached = 0, True
        for number, prefix in enumerate(_prefixes(key, token_ids, stride), 1):
            is_cached = is_cached and self._prefixes.get(prefix) == beat.incarnation
            if is_cached:
                num_cached = number * stride
            self._prefixes[prefix] = beat.incarnation
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > max(1, beat.model.kv_capacity_tokens // stride):
            self._prefixes.popitem(last=False)
        return len(token_ids) - num_cached


def _prefixes(key: bytes, token_ids: Sequence[int], stride: int) -> Iterator[bytes]:
    """[16]-byte hashes of the prefixes of `stride` tokens, twice as many, and so on. `key`: hash of
    the cache namespace and adapter, see `prefix_key`.
    """
    digest = hashlib.blake2b(key, digest_size=16)
    for start in range(0, len(token_ids) - stride + 1, stride):
        digest.update(array("q", token_ids[start : start + stride]).tobytes())
        yield digest.digest()
