"""Names of `vllm.logger`."""

import logging


def init_logger(name: str) -> logging.Logger:
    """Return the logger of this name."""
    return logging.getLogger(name)
