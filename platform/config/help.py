"""`quire help`: the commands grouped by purpose, because Django's own list is long and mixed."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

from django.core.management import get_commands, load_command_class

#: Short aliases of commands, as users of ollama and vLLM type them.
ALIASES = {
    "ps": "status",
    "list": "list_models",
    "rm": "delete_model",
    "run-batch": "run_batch",
    "complete": "chat",
    "collect-env": "status",
}
#: Title -> commands. The short help describes the first ones of a group, `--help=all` all of them.
GROUPS = {
    "Start": ("up", "serve", "run", "chat", "transcribe"),
    "Models": (
        *("list_models", "pull", "load_model", "unload_model", "delete_model", "restart_model"),
        *("sleep_model", "wake_model", "list_tiers", "load_report", "save_quantized"),
    ),
    "Adapters and tools": (
        *("load_adapter", "list_adapters", "promote_adapter", "rollback_adapter"),
        *("unload_adapter", "pin_adapter", "unpin_adapter", "fetch_adapter"),
        *("set_mcp_server", "list_mcp_servers", "check_mcp_server", "delete_mcp_server"),
    ),
    "Tenants and keys": (
        *("create_tenant", "create_key", "list_tenants", "list_keys", "update_tenant"),
        *("rotate_key", "revoke_key", "export_tenant", "erase_tenant"),
    ),
    "People": (
        *("create_user", "invite", "list_users", "update_user", "delete_user", "set_password"),
        *("list_members", "set_member", "remove_member", "list_invitations", "revoke_invitation"),
        *("create_service_account", "list_service_accounts", "retire_service_account"),
    ),
    "Money": (
        *("set_price", "set_budget", "list_prices", "delete_price", "list_budgets"),
        *("delete_budget", "set_webhook"),
    ),
    "Operate": (
        *("status", "bench", "list_settings", "gateway", "supervise", "engine", "worker"),
        *(
            "endpoint_picker",
            "run_batch",
            "chaos",
            "migrate",
            "makemigrations",
            "upgrade",
            "prune_cache",
            "verify_tier",
            "drop_tier",
            "drain_usage",
            "reconcile_usage",
            "changepassword",
        ),
        "openapi",
    ),
}
#: Number of commands per group that the short help describes.
NUM_DESCRIBED = {"Start": 4, "Models": 5, "Adapters": 1}
DEFAULT_NUM_DESCRIBED = 2
#: Commands of Django and of other packages that an operator may need.
DJANGO_COMMANDS = ("createsuperuser", "check")
WIDTH = 96


def overview(*, full: bool = False) -> str:
    """Return Quire's commands with the first sentence of their help. Requires `django.setup()`.

    Args:
        full: describe every command, not only the common ones of each group.
    """
    program = Path(sys.argv[0]).name
    lines = ["", f"Usage: {program} COMMAND [options]"]
    installed = get_commands()  # images don't include `chaos`
    for title, names in GROUPS.items():
        available = [name for name in names if name in installed]
        count = len(available) if full else NUM_DESCRIBED.get(title, DEFAULT_NUM_DESCRIBED)
        lines += ["", title, *(_command_line(name) for name in available[:count])]
        if rest := available[count:]:
            lines.append(_wrapped("more: " + ", ".join(rest), indent="  "))
    short_names = ", ".join(f"{alias} ({name})" for alias, name in ALIASES.items())
    every = "" if full else f"{program} --help=all describes all. "
    lines += [
        "",
        _wrapped(f"Short names: {short_names}."),
        _wrapped(
            f"{every}{program} COMMAND --help explains one. Django's: {', '.join(DJANGO_COMMANDS)} "
            f"and more; {program} help --commands names them."
        ),
    ]
    return "\n".join(lines)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text,
        width=WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


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
