"""JSON in a text column."""

from __future__ import annotations

import json
from typing import Any

from django.db import models


def json_chars(*values: Any) -> int:
    """What values take in columns of this kind."""
    return sum(len(json.dumps(value)) for value in values)


class JsonTextField(models.TextField):
    """Any JSON value, stored as ASCII text.

    PostgreSQL's own JSON type takes no NUL character, which clients may send; here it is the six
    characters of its escape. Nothing looks inside these columns, so nothing is lost.
    """

    def from_db_value(self, value: str | None, expression: Any, connection: Any) -> Any:
        """Text from the database."""
        return None if value is None else json.loads(value)

    def to_python(self, value: Any) -> Any:
        """Values are Python's already, but in fixtures and forms."""
        return json.loads(value) if isinstance(value, str) else value

    def get_prep_value(self, value: Any) -> str:
        """A value for the database."""
        return json.dumps(value)

    def value_to_string(self, obj: models.Model) -> str:
        """For `dumpdata`."""
        return json.dumps(self.value_from_object(obj))
