"""What Django's cache holds in Redis is JSON: no pickle, anywhere."""

import json
from typing import Any


class JsonSerializer:
    """Whole numbers as Redis counts them, everything else as JSON."""

    def dumps(self, value: Any) -> bytes | int:
        """For Redis. Raises TypeError for what JSON can't hold."""
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        return json.dumps(value).encode()

    def loads(self, data: bytes) -> Any:
        """From Redis."""
        return json.loads(data)
