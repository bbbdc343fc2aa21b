"""`PrefillPlanner`: decides which prompts are computed, or their media encoded, by another replica
than the one that decodes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.contract.kv_transfer_config import KV_PRODUCER
from engine.contract.messages import EngineRequest, Heartbeat
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
        producers, encoders = [], []
        for replica in replicas:
            theirs = replica.heartbeat.kv_handover
            is_available = replica.ready and not (replica.silent or replica.heartbeat.paused)
            if theirs is None or theirs.key_space != handover.key_space or not is_available:
                continue
            if theirs.role == KV_PRODUCER:
                producers.append(replica)
            elif theirs.only_encodes and replica.load <= decode.load + slack:
                encoders.append(replica)
        num_cached = self._num_cached_tokens(flight, handover.step_tokens, decode.heartbeat)
        producer = None
        if len(flight.request.prompt_token_ids) - num_cached > handover.step_tokens:
            request = flight.request
            producer = choose_replica(producers, request.prefix_key, slack, request.adapter_digest)
            if producer is not None and producer.load > decode.load + slack:
                producer = None
        # Who computes the prompt reads what encoders have in their memory, and is told of it alone.
        reader = (producer or decode).heartbeat
        loads = reader.kv_handover is not None and reader.kv_handover.loads_encodings
        if encoders and loads and not flight.encoded:
            name = reader.incarnation if any(encoder.kv_address for encoder in encoders) else ""
            if self._record_media(flight, num_cached, decode.heartbeat, name):
                return min(encoders, key=lambda encoder: encoder.load)
        if producers:
            self._record_prefixes(flight, handover.step_tokens, decode.heartbeat)
        return producer

    def _record_media(
        self, flight: InFlightRequest, num_cached: int, beat: Heartbeat, reader: str
    ) -> bool:
        """Whether a prompt has media after its first `num_cached` tokens that weren't encoded
        before for `reader`; "": for all. As many are remembered as there are tokens in a replica's
        KV cache, at most.
        """
        is_new, request = False, flight.request
        scope = hashlib.sha256(
            f"{reader} {request.adapter_digest} {request.cache_namespace}".encode()
        )
        for item in request.media:
            if item.end <= num_cached:
                continue
            name = scope.digest() + item.digest
            is_new = is_new or name not in self._media
            self._media[name] = None
            self._media.move_to_end(name)
        while len(self._media) > max(1, beat.model.kv_capacity_tokens):
            self._media.popitem(last=False)
        return is_new

    def _num_cached_tokens(self, flight: InFlightRequest, stride: int, beat: Heartbeat) -> int:
        """Length of a prompt's longest prefix that a replica has answered."""
        num_cached = 0
        for prefix in _prefixes(flight.request, stride):
            if self._prefixes.get(prefix) != beat.incarnation:
                break
            num_cached += stride
        return num_cached

    def _record_prefixes(self, flight: InFlightRequest, stride: int, beat: Heartbeat) -> None:
        """Remember that a replica answers a prompt. The prefixes are limited to what its KV cache
        holds, in strides.
        """
        for prefix in _prefixes(flight.request, stride):
            self._prefixes[prefix] = beat.incarnation
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > max(1, beat.model.kv_capacity_tokens // stride):
            self._prefixes.popitem(last=False)


def _prefixes(request: EngineRequest, stride: int) -> Iterator[bytes]:
    """[16]-byte hashes of a prompt's prefixes of `stride` tokens, twice as many, and so on."""
    token_ids = request.prompt_token_ids
    digest = hashlib.blake2b(request.prefix_key, digest_size=16)
    for start in range(0, len(token_ids) - stride + 1, stride):
        digest.update(array("q", token_ids[start : start + stride]).tobytes())
        yield digest.digest()
