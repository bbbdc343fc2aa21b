"""`manage.py help`: Quire's own commands by what they are for; Django's list is long and mixed."""

from __future__ import annotations

import re
import textwrap

from django.core.management import get_commands, load_command_class

GROUPS = {
    "Serve": ("up", "serve", "gateway", "supervise", "engine", "worker"),
    "Look": ("status", "list_models", "list_tenants", "list_keys"),
    "Models": (
        "load_model",
        "unload_model",
        "delete_model",
        "restart_model",
        "sleep_model",
        "wake_model",
        "load_report",
        "save_quantized",
    ),
    "Adapters": (
        *("load_adapter", "list_adapters", "promote_adapter", "rollback_adapter"),
        *("unload_adapter", "pin_adapter", "unpin_adapter"),
    ),
    "Tenants and keys": (
        *("create_tenant", "update_tenant"),
        *("create_key", "rotate_key", "revoke_key"),
    ),
    "People": (
        *("create_user", "list_users", "update_user", "delete_user", "set_password"),
        *("list_members", "set_member", "remove_member"),
        *("invite", "list_invitations", "revoke_invitation"),
        *("export_tenant", "erase_tenant"),
        *("create_service_account", "list_service_accounts", "retire_service_account"),
    ),
    "Money": (
        *("set_price", "list_prices", "delete_price"),
        *("set_budget", "list_budgets", "delete_budget", "set_webhook"),
    ),
    "Ask": ("chat", "run_batch"),
    "Prove": ("bench", "chaos"),
    "Upkeep": (
        *(
            "list_settings",
            "drain_usage",
            "reconcile_usage",
            "migrate",
            "changepassword",
            "openapi",
        ),
    ),
}
#: Of Django's and others', those that an operator meets.
DJANGO_COMMANDS = ("createsuperuser", "check")
WIDTH = 96


def overview() -> str:
    """All commands of Quire with the first sentence of their help. Django must be set up."""
    lines = ["", "Quire's commands; `manage.py COMMAND --help` explains each."]
    installed = get_commands()  # an image comes without `chaos`
    for title, names in GROUPS.items():
        lines += ["", title, *(_command_line(name) for name in names if name in installed)]
    django_commands = (
        f"Django's: {', '.join(DJANGO_COMMANDS)} and more; `manage.py help --commands` names all."
    )
    lines += ["", textwrap.fill(django_commands, width=WIDTH, break_on_hyphens=False)]
    return "\n".join(lines)


def _command_line(name: str) -> str:
    text = load_command_class(str(get_commands()[name]), name).help
    first = re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
    return textwrap.fill(
        first,
        width=WIDTH,
        initial_indent=f"  {name:<22} ",
        subsequent_indent=" " * 25,
        break_on_hyphens=False,
    )
