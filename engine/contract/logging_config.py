"""`QUIRE_LOGGING_CONFIG`: logging as an operator's file says. Torch-free."""

from __future__ import annotations

import json
import logging.config
import os
from pathlib import Path
from typing import Any

from engine.contract.errors import ConfigError

VARIABLE = "QUIRE_LOGGING_CONFIG"


def logging_config() -> dict[str, Any] | None:
    """What the file holds that the variable names, for `logging.config.dictConfig`; None: no file.

    Raises `ConfigError` for a file that can't be read or holds no JSON object.
    """
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return None
    try:
        found = json.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{VARIABLE}: {name} can't be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {name} isn't JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{VARIABLE}: {name} must hold a JSON object for logging's dictConfig.")
    return found


def apply_logging_config() -> bool:
    """Log as that file says; whether there is one.

    Raises `ConfigError` for one that `dictConfig` refuses.
    """
    config = logging_config()
    if config is None:
        return False
    try:
        logging.config.dictConfig(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        reason = error.__cause__ or error
        raise ConfigError(f"{VARIABLE}: {error} ({reason})") from None
    return True
