"""`AdapterAdmission`: holds a request back until its adapter is on the device."""

from __future__ import annotations

from collections.abc import Callable

from engine.contract.errors import InvalidRequest, QuireError
from engine.contract.messages import EngineRequest
from engine.lora.adapter_cache import AdapterManager
from engine.scheduler.request import Request, SequenceStatus


class AdapterAdmission:
    """An `AdmissionGate`: requests without an adapter pass immediately."""

    def __init__(
        self,
        pool: AdapterManager,
        check_vocabulary: Callable[[EngineRequest, int], None],
        vocab_size: int,
    ) -> None:
        """`vocab_size`: vocabulary of the model. `check_vocabulary` raises `InvalidRequest`."""
        self._pool, self._check_vocabulary, self._vocab_size = pool, check_vocabulary, vocab_size

    def check(self, message: EngineRequest) -> None:
        """Raise `InvalidRequest` for an adapter that can never be used here."""
        if message.adapter is not None:
            self._pool.check(message.adapter)

    def vocab_size(self, message: EngineRequest) -> int | None:
        """Return a request's vocabulary size; None while an adapter that may add tokens loads."""
        size = self._adapter_vocab_size(message)
        return None if size is None else size or self._vocab_size

    def _adapter_vocab_size(self, message: EngineRequest) -> int | None:
        ref = message.adapter
        return 0 if ref is None else self._pool.vocab_size(ref.digest)

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting

    @property
    def has_pending(self) -> bool:
        return self._pool.has_pending

    @property
    def is_preparing(self) -> bool:
        return any(self._pool.loading_adapters)  # others wait for a free place

    def admit(self, request: Request) -> bool:
        if not self._pool.admit(request):
            return False
        self._apply_adapter(request)
        return True

    def poll_ready(self, timeout_s: float) -> list[tuple[Request, QuireError | None]]:
        return [
            (request, error or self._start_waiting(request))
            for request, error in self._pool.poll_ready(timeout_s)
        ]

    def _apply_adapter(self, request: Request) -> None:
        """Let the adapter, which is on the device, decide how a request's media are encoded,
        and which tokens there are.
        """
        request.vocab_size = self._adapter_vocab_size(request.message) or 0
        digest = request.message.adapter_digest
        if digest and self._pool.changes_encoder(digest):
            request.media = [item.with_adapter(digest) for item in request.media]
            if request.encoder_input is not None:
                request.encoder_input = request.encoder_input.with_adapter(digest)

    def _start_waiting(self, request: Request) -> InvalidRequest | None:
        """Check a request against its adapter's vocabulary, which is known once it is loaded."""
        self._apply_adapter(request)
        try:
            vocab_size = request.vocab_size or self._vocab_size
            self._check_vocabulary(request.message, vocab_size)
        except InvalidRequest as refusal:
            return refusal
        for sequence in request.sequences:
            if not sequence.finished:
                sequence.status = SequenceStatus.WAITING
        return None
