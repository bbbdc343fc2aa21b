"""Engine settings from a command's options."""

from collections.abc import Mapping
from typing import Any

from catalog.setting_checks import check_settings
from engine.contract.config import SETTINGS
from engine.contract.vllm_settings import BY_NAME, translated
from engine.text.chat_template import read_template

#: Commands have words of their own for these.
NAMED = frozenset({"model", "served_model_name"})


def given_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The engine settings that were given on the command line, checked.

    Raises: `ConfigError` (with `param`) for one that can't be used.
    """
    names = (SETTINGS | set(BY_NAME)) - NAMED
    given = {name: options[name] for name in names if options.get(name) is not None}
    ours = translated(given, SETTINGS)
    check_settings(ours)
    if ours.get("chat_template"):  # its text: a replica elsewhere has no such file
        ours["chat_template"] = read_template(ours["chat_template"])
    return ours
