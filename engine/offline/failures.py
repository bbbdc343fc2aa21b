"""Error handling for a batch of requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from engine.contract.errors import QuireError

log = logging.getLogger(__name__)


class Result(Protocol):
    """The result of a request. `error` is None if it succeeded."""

    @property
    def error(self) -> QuireError | None: ...


def check_failures(results: Sequence[Result]) -> None:
    """Raise the first error if all requests failed, so that no result is lost. Otherwise log
    failures as a warning.
    """
    errors = [result.error for result in results if result.error is not None]
    if not errors:
        return
    if len(errors) == len(results):
        raise errors[0]
    log.warning("%d of %d requests failed, the first: %s", len(errors), len(results), errors[0])
