"""Errors of a batch of requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from engine.offline.outputs import PoolingRequestOutput, RequestOutput

log = logging.getLogger(__name__)


def check_failures(results: Sequence[RequestOutput | PoolingRequestOutput[Any]]) -> None:
    """Raise the first error if all requests failed: no result is lost then."""
    errors = [result.error for result in results if result.error is not None]
    if not errors:
        return
    if len(errors) == len(results):
        raise errors[0]
    log.warning("%d of %d requests failed, the first: %s", len(errors), len(results), errors[0])
