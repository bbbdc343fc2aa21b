"""`PoolingJob`: a checked request to a pooling model, and `Pooled`, its run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.contract.errors import EngineFault, InvalidRequest
from engine.contract.pooling_params import PoolingParams
from engine.contract.protocol import EngineRequest
from inference.engine_client import Piece
from inference.generation import Generation, Increment, Job, Usage
from inference.generation.output import OutputState
from inference.settings import gateway_settings
from metering.access import Admission

ELEMENT_BYTES = 4


@dataclass(kw_only=True)
class PoolingJob(Job):
    """Prompts to pool; nothing is generated from them.

    Attributes:
        pooling: [num_prompts] what to make of each.
    """

    generates = False

    pooling: list[PoolingParams] = field(default_factory=list)

    @property
    def max_output_tokens(self) -> int:
        """There is no output."""
        return 0

    def wanted(self) -> dict[str, Any]:
        """The task, and how long vectors were to be; there is no sampling."""
        first = self.pooling[0]
        found = {"task": first.task or self.endpoint, "dimensions": first.dimensions}
        return {name: value for name, value in found.items() if value is not None}

    async def check(self) -> None:
        """Raise `InvalidRequest` for what could never run, before anything is reserved or sent."""
        info = self.served.info
        facts = info.pooling
        for params in self.pooling:
            params.check_against_model(
                model=self.served.name,
                tasks=info.tasks,
                embedding_size=facts.embedding_size if facts is not None else 0,
                matryoshka=facts.matryoshka if facts is not None else None,
            )
        self._check_size(facts.embedding_size if facts is not None else 0)
        self.check_context()
        self.check_priority()

    def _check_size(self, width: int) -> None:
        """Vectors of every token are much more than the text was: refuse what can't be carried."""
        elements = sum(
            (params.dimensions or width) * (len(prompt) if params.by_token else 1)
            for prompt, params in zip(self.prompts, self.pooling, strict=True)
        )
        limit = gateway_settings().max_pooling_result_bytes
        if elements * ELEMENT_BYTES > limit:
            raise InvalidRequest(
                f"The answer would have {elements * ELEMENT_BYTES} bytes of vectors; at most "
                f"{limit} may be asked for at once.",
                param="prompt",
            )

    def engine_requests(self, reserved_tokens: int | None = None) -> Iterator[EngineRequest]:
        """One a prompt, made as they are taken."""
        requests = super().engine_requests(reserved_tokens)
        return (
            msgspec.structs.replace(request, pooling=params)
            for request, params in zip(requests, self.pooling, strict=True)
        )


class Pooled(Generation):
    """A running job whose outputs are vectors: admitted, metered and moved between replicas as
    every generation is."""

    def __init__(
        self, job: PoolingJob, admission: Admission, outputs: list[list[OutputState]]
    ) -> None:
        self.results: list[bytes] = [b""] * len(job.prompts)
        super().__init__(job, admission, outputs)

    def _push(self, piece: Piece) -> Increment | None:
        if piece.pooled is not None:
            self.results[piece.number] = piece.pooled
        return super()._push(piece)

    def _time(self, num_tokens: int) -> None:
        """No token comes, so none is the first."""

    async def collect(self) -> list[bytes]:
        """All results, little-endian float32, in the order of the prompts.

        Raises: what the engine or the gateway refuses or fails with. It is released in any case.
        """
        try:
            while not self.finished:
                await self.next()
        finally:
            self.release()
        if not all(self.results):
            raise EngineFault("The engine gave no result for a prompt.")
        return self.results

    @property
    def usage(self) -> Usage:
        """The prompts' tokens; there are no others."""
        return Usage(prompt_tokens=self.job.prompt_tokens, cached_tokens=sum(self._cached))
