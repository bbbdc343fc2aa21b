"""Saving a row only when it's right, with errors that name the field."""

from collections.abc import Collection
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction

from engine.contract.errors import InvalidRequest
from tenants.errors import Conflict


def save_valid(row: models.Model, *, unchecked: Collection[str] = ()) -> None:
    """Check all fields but those named `unchecked`, and save.

    Raises: `InvalidRequest` with the field in `param`; `Conflict` when a unique value is taken.
    """
    try:
        row.full_clean(exclude=set(unchecked), validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        field, messages = next(iter(error.message_dict.items()))
        param = None if field == "__all__" else field
        label = f"{param}: " if param else ""
        raise InvalidRequest(label + " ".join(messages), param=param) from error
    try:
        with transaction.atomic():  # a savepoint: a clash leaves the caller's transaction usable
            row.save()
    except IntegrityError as error:
        raise Conflict(f"There is already a {row._meta.verbose_name} {row}.") from error


def changed(row: models.Model, changes: dict[str, Any]) -> dict[str, list[Any]]:
    """Set the fields and return `{field: [before, after]}` for those that really change."""
    difference = {}
    for field, after in changes.items():
        before = getattr(row, field)
        if before != after:
            setattr(row, field, after)
            difference[field] = [before, after]
    return difference
