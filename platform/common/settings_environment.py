"""Reading this process's settings, and passing them to the processes that it starts."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from django.core.checks import CheckMessage, Warning
from django.core.exceptions import ImproperlyConfigured
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from common.settings import WITHOUT_VARIABLE, QuireSettings, group_of, is_secret, variable_of
from engine.contract.vllm_variables import unused_variables

#: Names of variables set by command-line flags, for the processes that the command starts.
FROM_FLAGS = "QUIRE_FROM_FLAGS"
#: Fields without a variable, as JSON: how a command passes them to the processes that it starts.
INTERNAL = "QUIRE_INTERNAL"
#: Variables that no installation sets: for developers, tests, and communication between processes.
NO_SETTINGS = frozenset(
    {
        *("QUIRE_CACHE_DIR", "QUIRE_CHAOS_RELAY", "QUIRE_KERNELS", "QUIRE_LOGGING_CONFIG"),
        *("QUIRE_CPU_BUILD_TIMEOUT", "QUIRE_CPU_ISA", "QUIRE_CPU_SANITIZE", "QUIRE_TERMINAL"),
        "QUIRE_PREDECESSOR_TOKENS",
        *("QUIRE_STEP_RECORD", FROM_FLAGS, INTERNAL),
    }
)
#: QUIRE_TEST_..., QUIRE_SUITE_...: the tests' own.
OF_TESTS = ("TEST", "SUITE")


def load_settings() -> QuireSettings:
    """Read this process's settings. Raises ImproperlyConfigured with one line per error."""
    problems = []
    try:
        loaded = QuireSettings()
        if internal := internal_fields():
            loaded = loaded.replace(**internal)
    except ValidationError as error:
        # A default derived from another setting is missing if that one is invalid.
        details = error.errors(include_url=False)
        problems = [_describe(d) for d in details if d["type"] != "default_factory_not_called"]
    if problems:
        raise ImproperlyConfigured("\n".join(problems))
    return loaded


#: Descriptions of allowed values, by pydantic error type.
_RULES = {
    "bool_parsing": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "byte_size": "must be a size in bytes such as 10485760 or 10MiB",
    "byte_size_unit": "must be a size in bytes such as 10485760 or 10MiB",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "extra_forbidden": "is no setting",
}


def _describe(error: ErrorDetails) -> str:
    """A sentence with the variable, the allowed values, and the value unless it may be secret."""
    context = error.get("ctx", {})
    rule = _RULES.get(error["type"], error["msg"]).format_map(context)
    if "error" in context:
        rule = str(context["error"])
    if not error["loc"]:
        return f"{rule}."
    name, *parts = error["loc"]
    by_variable = {variable_of(field): field for field in QuireSettings.model_fields}
    field = QuireSettings.model_fields.get(by_variable.get(str(name), str(name)))
    variable = str(name) if field is None or name in by_variable else variable_of(str(name))
    # Of `name=value,...` the name; positions in a list add nothing to the value.
    keys = [part for part in parts if isinstance(part, str)]
    sentence = ": ".join([variable, *keys]) + f" {rule}"
    if field is None or not field.repr or is_secret(field):
        return f"{sentence}."
    return f"{sentence}; got {error['input']!r}."


def internal_fields() -> dict[str, Any]:
    """Fields set by the command that started this process."""
    return dict(json.loads(os.environ.get(INTERNAL) or "{}"))


def set_internal_fields(fields: dict[str, Any]) -> None:
    """Pass these fields to the processes that are started from here."""
    if fields:
        os.environ[INTERNAL] = json.dumps(internal_fields() | fields)


def record_flags(names: list[str]) -> None:
    """Record that flags have set these variables."""
    os.environ[FROM_FLAGS] = ",".join(dict.fromkeys([*variables_from_flags(), *names]))


def variables_from_flags() -> list[str]:
    return [name for name in os.environ.get(FROM_FLAGS, "").split(",") if name]


def variables() -> Iterator[str]:
    """Every variable that is a setting."""
    for name, field in QuireSettings.model_fields.items():
        if group_of(field) != WITHOUT_VARIABLE:
            yield variable_of(name)


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """A warning for each variable with a prefix of Quire's or vLLM's that has no effect."""
    names = set(variables())
    unknown = sorted(
        name
        for name in environment
        if name.startswith("QUIRE_")
        and name.split("_")[1] not in OF_TESTS
        and name not in names | NO_SETTINGS
    )
    sentences = [
        f"{name} is no setting and changes nothing.{_suggest(name, names)}" for name in unknown
    ]
    return [*sentences, *unused_variables(environment)]


def check_variables(**_: Any) -> list[CheckMessage]:
    """For `manage.py check`."""
    return [Warning(sentence, id="config.W001") for sentence in unknown_variables()]


def _suggest(name: str, names: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.8)
    return f" Did you mean {close[0]}?" if close else ""
