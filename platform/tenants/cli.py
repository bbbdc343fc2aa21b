"""Options and look-ups of the commands for tenants and keys."""

from argparse import BooleanOptionalAction
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser

from common.commands import QuireCommand, comma_list, yes_or_no
from common.installation import PROGRAM
from tenants import api_keys
from tenants.access import find_unknown_models
from tenants.actions import LIMITS, OWNER_FIELDS
from tenants.models import ApiKey, Membership, Role, ServiceAccount, Tenant, User


def find_tenant(slug: str) -> Tenant:
    """The tenant, or a `CommandError` that lists the existing ones."""
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        existing = ", ".join(Tenant.objects.values_list("slug", flat=True)[:20]) or "none yet"
        raise CommandError(f"Tenant {slug!r} not found. Tenants: {existing}.")
    return tenant


def find_user(username: str) -> User:
    """The user, or a `CommandError`."""
    user = User.objects.filter(username=username).first()
    if user is None:
        raise CommandError(f"User {username!r} not found. See {PROGRAM} list_users.")
    return user


def find_member(tenant: Tenant, user: User) -> Membership:
    """The user's membership in the tenant, or a `CommandError`."""
    membership = Membership.objects.filter(tenant=tenant, user=user).first()
    if membership is None:
        raise CommandError(f"{user} isn't a member of {tenant}. See {PROGRAM} list_members.")
    return membership


def find_account(tenant: Tenant, name: str) -> ServiceAccount:
    """The tenant's service account of this name, or a `CommandError`."""
    account = ServiceAccount.objects.filter(tenant=tenant, name=name).first()
    if account is None:
        raise CommandError(
            f"{tenant} has no service account {name!r}. See {PROGRAM} list_service_accounts."
        )
    return account


def warn_of_unknown_models(command: QuireCommand, tenant: Tenant, names: Sequence[str]) -> None:
    """Print a note for each name that the tenant has no model or adapter of yet."""
    for name in find_unknown_models(tenant, names):
        command.print_hint(
            f"No model or adapter is called {name} today: it applies as soon as one is."
        )


def add_tenant_option(parser: CommandParser) -> None:
    """Add the required `--tenant`."""
    parser.add_argument(
        "--tenant", required=True, metavar="NAME", help="tenant slug, see list_tenants"
    )


def add_role_option(parser: CommandParser) -> None:
    """Add `--role`; the default is a member's."""
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        default=Role.MEMBER.value,
        help="(default: %(default)s)",
    )


#: Help text of every option or argument that `find_key` reads.
KEY_HELP = "its id from list_keys, its prefix (sk-quire-...), or the whole key"


def add_limit_options(parser: CommandParser, *, defaults: bool) -> None:
    """Add the options of `actions.LIMITS`. `defaults`: whether help shows a new tenant's values."""

    def add(option: str, text: str, default: str, **kind: Any) -> None:
        text += f" (default: {default})" if defaults else ""
        parser.add_argument(option, help=text, **kind)

    ledger = "days to keep single requests in the usage ledger; 0: forever"
    add("--keep-usage-days", ledger, "0", type=int, metavar="N")
    content = "days to keep files, batches and stored responses; 0: until each object's own expiry"
    add("--keep-content-days", content, "0", type=int, metavar="N")
    prompts = "store prompts and completions with request logs"
    add("--store-prompts", prompts, "no", action=BooleanOptionalAction)
    add("--weight", "share of a busy engine relative to other tenants", "1", type=float)
    reserved = "part of each replica's KV cache that is reserved for the tenant"
    add("--kv-reserved-fraction", reserved, "0", type=float)
    maximum = "maximum part of each replica's KV cache for the tenant"
    add("--kv-max-fraction", maximum, "1", type=float)
    priority = "highest priority that requests may set: from -N (runs first) to 0"
    add("--max-priority", priority, "0", type=int, metavar="N")
    requests = "requests per minute of all keys together; 0: no limit"
    add("--requests-per-minute", requests, "QUIRE_TENANT_QUOTAS", type=int, metavar="N")
    tokens = "tokens per minute, prompts and outputs together; 0: no limit"
    add("--tokens-per-minute", tokens, "QUIRE_TENANT_QUOTAS", type=int, metavar="N")
    media = "images, videos, documents and audio files per minute; 0: no limit"
    add("--media-per-minute", media, "0", type=int, metavar="N")
    add(
        "--media-bytes-per-minute",
        "bytes of such files per minute; 0: no limit",
        "0",
        type=int,
        metavar="N",
    )
    seconds = "seconds of decoding such files per minute; 0: no limit"
    add("--media-seconds-per-minute", seconds, "0", type=int, metavar="N")
    running = "maximum concurrent requests of the tenant; 0: no limit"
    add("--max-running-requests", running, "0", type=int, metavar="N")
    context = "maximum tokens of a request, prompt plus output; 0: the model's limit"
    add("--max-context-tokens", context, "0", type=int, metavar="N")
    models = "models that the tenant may use; '': all that it can access"
    add("--allowed-models", models, "all", type=comma_list, metavar="A,B")
    conversations = "store playground conversations on the server"
    add("--keep-conversations", conversations, "yes", type=yes_or_no, metavar="YES|NO")
    zone = "time zone of its budget periods, such as Europe/Berlin"
    add("--time-zone", zone, "UTC", metavar="ZONE")


def find_key(text: str) -> ApiKey:
    """The key specified as in `KEY_HELP`, or a `CommandError`."""
    rest = text.strip().removeprefix(api_keys.PREFIX).rstrip(".")
    public_id = rest[: api_keys.PUBLIC_CHARS]
    key = ApiKey.objects.select_related("tenant").filter(public_id=public_id).first()
    if key is None:
        raise CommandError(f"Key {public_id!r} not found. See {PROGRAM} list_keys.")
    return key


def limits_of(options: dict[str, Any]) -> dict[str, Any]:
    """The limits on the command line, as arguments of the actions."""
    limits = {n: options[n] for n in (*LIMITS, *OWNER_FIELDS) if options[n] is not None}
    for name in ("keep_usage_days", "keep_content_days"):
        if limits.get(name) == 0:
            limits[name] = None
    return limits
