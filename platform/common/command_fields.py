"""Options of commands from the fields of a request's body."""

import argparse
from functools import partial
from typing import Any

from django.core.management.base import CommandParser
from rest_framework.exceptions import ValidationError
from rest_framework.fields import ChoiceField, Field, IntegerField, ListField, empty
from rest_framework.serializers import Serializer

from common.commands import comma_list


def add_field_options(
    parser: CommandParser, serializer: type[Serializer], *names: str, **flags: str
) -> None:
    """Add an option for each named field of a request's body, which says its type, bounds, choices
    and help. `flags`: fields whose option has another name, and that name.
    """
    fields = serializer().fields
    for name in (*names, *flags):
        field, flag = fields[name], flags.get(name, name).replace("_", "-")
        has_items, is_number = isinstance(field, ListField), isinstance(field, IntegerField)
        choices = list(field.choices) if isinstance(field, ChoiceField) else None
        metavar = "A,B" if has_items else "N" if is_number else flag.upper().replace("-", "_")
        parser.add_argument(
            f"--{flag}",
            dest=name,
            type=partial(_parse_field, field),
            choices=choices,
            metavar=None if choices else metavar,
            required=field.required,
            default=None if field.default is empty or callable(field.default) else field.default,
            help=str(field.help_text or ""),
        )


def _parse_field(field: Field, text: str) -> Any:
    """Raises ArgumentTypeError."""
    try:
        return field.run_validation(comma_list(text) if isinstance(field, ListField) else text)
    except ValidationError as error:
        messages = error.detail.values() if isinstance(error.detail, dict) else [error.detail]
        reason = " ".join(str(message) for items in messages for message in items)
        if choices := getattr(getattr(field, "child", field), "choices", None):
            reason += f" There are {', '.join(choices)}."
        raise argparse.ArgumentTypeError(reason) from error
