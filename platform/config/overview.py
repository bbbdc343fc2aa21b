"""`manage.py help`: Quire's own commands by what they are for; Django's list is long and mixed."""

from __future__ import annotations

import re
import textwrap

from django.core.management import get_commands, load_command_class

GROUPS = {
    "Serve": ("up", "gateway", "supervise", "engine", "worker"),
    "Look": ("status", "list_models", "list_tenants", "list_keys"),
    "Models": ("load_model", "unload_model", "delete_model", "sleep_model", "wake_model"),
    "Tenants and keys": (
        *("create_tenant", "update_tenant"),
        *("create_key", "rotate_key", "revoke_key"),
    ),
    "Ask": ("chat", "run_batch", "bench"),
    "Upkeep": ("drain_usage", "openapi"),
}
#: Of Django's and others', those that an operator meets.
OTHERS = ("migrate", "createsuperuser", "changepassword", "check", "axes_reset")
WIDTH = 96


def overview() -> str:
    """Every command of ours with the first sentence of its help. Django must be set up."""
    lines = ["", "Quire's commands; `manage.py COMMAND --help` explains each."]
    for title, names in GROUPS.items():
        lines += ["", title, *(_line(name) for name in names)]
    others = f"Django's: {', '.join(OTHERS)} and more; `manage.py help --commands` names all."
    lines += ["", textwrap.fill(others, width=WIDTH, break_on_hyphens=False)]
    return "\n".join(lines)


def _line(name: str) -> str:
    text = load_command_class(str(get_commands()[name]), name).help
    first = re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
    return textwrap.fill(
        first,
        width=WIDTH,
        initial_indent=f"  {name:<14} ",
        subsequent_indent=" " * 17,
        break_on_hyphens=False,
    )
