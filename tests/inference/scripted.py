"""A fake replica that says what a test wants it to say, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.contract.messages import EngineRequest, ErrorInfo, FlightRecord, TokenDelta
from engine.text.tokenizer import Tokenizer
from tests.fakes.fake_replica import FakeReplica, Sequence

Script = Callable[[EngineRequest, int], list[int]]


class ScriptedReplica(FakeReplica):
    """Output `index` of a request is `script(request, index)`, then EOS."""

    def __init__(self, redis_url: str, script: Script, **options: Any) -> None:
        super().__init__(redis_url, **options)
        self.script = script

    def _token(self, request: EngineRequest, sequence: Sequence, delta: TokenDelta) -> int:
        tokens = self.script(request, sequence.index)
        position = sequence.num_tokens
        if position < len(tokens):
            token = tokens[position]
        else:
            token, sequence.finish_reason = self.model.eos_token_ids[0], "stop"
        if token in (request.sampling.stop_token_ids or ()):
            sequence.finish_reason, delta.stop_reason = "stop", token
        budget = request.sampling.output_budget(
            len(request.prompt_token_ids), self.model.max_model_len
        )
        sequence.num_tokens += 1
        if sequence.finish_reason is None and sequence.num_tokens >= budget:
            sequence.finish_reason = "length"
        delta.token_ids = [token]
        return token

    def _advance(self, request: EngineRequest, sequence: Sequence) -> TokenDelta:
        ran = not sequence.first
        delta = super()._advance(request, sequence)
        if delta.finish_reason:
            delta.flight = FlightRecord(num_steps=int(ran or bool(delta.token_ids)))
        return delta


def says(tokenizer: Tokenizer, *texts: str) -> Script:
    """Output `index` is the text with that index (the last one for those beyond)."""
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return lambda request, index: encoded[min(index, len(encoded) - 1)]


def byte_by_byte(tokenizer: Tokenizer, text: str) -> Script:
    """The text in tokens of one byte each: characters and stop strings are split all over."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    tokens = [by_byte[bytes([byte])] for byte in text.encode()]
    return lambda request, index: tokens


class FailingReplica(FakeReplica):
    """Makes five tokens of each output and then fails, as an engine does whose step raised."""

    def _advance(self, request: EngineRequest, sequence: Sequence) -> TokenDelta:
        delta = super()._advance(request, sequence)
        if delta.start >= 5:
            delta.token_ids, delta.finish_reason = [], "error"
            sequence.finish_reason, sequence.num_tokens = "error", -1
            delta.error = ErrorInfo(message="The step failed.", code="engine_fault")
        return delta
