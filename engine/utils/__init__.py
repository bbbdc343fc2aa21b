"""Names of `vllm.utils`."""

import uuid

from engine.offline.engine_args import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """Return a random id for a request."""
    return uuid.uuid4().hex
