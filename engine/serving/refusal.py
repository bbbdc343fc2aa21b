"""What a request is answered that can't run."""

from __future__ import annotations

from engine.contract.errors import QuireError
from engine.contract.protocol import EngineRequest, ErrorInfo, TokenDelta


def refusal(message: EngineRequest, error: QuireError) -> list[TokenDelta]:
    """The typed error, as the end of every output."""
    info = ErrorInfo.of(error)
    return [
        TokenDelta(request_id=message.request_id, index=index, finish_reason="error", error=info)
        for index in range(message.sampling.num_sequences)
    ]
