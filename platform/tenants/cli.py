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


def add_media_limits(parser: CommandParser, default: str) -> None:
    """Add limits on media per minute. `default`: the help text for an omitted limit."""
    for name, meaning in (
        ("media", "images, videos, documents and audio files per minute"),
        ("media-bytes", "bytes of such files per minute"),
        ("media-seconds", "seconds of decoding such files per minute"),
    ):
        parser.add_argument(
            f"--{name}-per-minute", type=int, metavar="N", help=f"{meaning}{default}"
        )


def add_limit_options(parser: CommandParser, *, defaults: bool) -> None:
    """Add the options of `actions.LIMITS`. `defaults`: whether help shows a new tenant's values."""

    def also(text: str) -> str:
        return f" (default: {text})" if defaults else ""

    parser.add_argument(
        "--keep-usage-days",
        type=int,
        metavar="N",
        help=f"days to keep single requests in the usage ledger; 0: forever{also('0')}",
    )
    parser.add_argument(
        "--keep-content-days",
        type=int,
        metavar="N",
        help="days to keep files, batches and stored responses; 0: until each object's own expiry"
        f"{also('0')}",
    )
    parser.add_argument(
        "--store-prompts",
        action=BooleanOptionalAction,
        help=f"store prompts and completions with request logs{also('no')}",
    )
    parser.add_argument(
        "--weight",
        type=float,
        help=f"share of a busy engine relative to other tenants{also('1')}",
    )
    parser.add_argument(
        "--kv-reserved-fraction",
        type=float,
        help=f"part of each replica's KV cache that is reserved for the tenant{also('0')}",
    )
    parser.add_argument(
        "--kv-max-fraction",
        type=float,
        help=f"maximum part of each replica's KV cache for the tenant{also('1')}",
    )
    parser.add_argument(
        "--max-priority",
        type=int,
        metavar="N",
        help=f"highest priority that requests may set: from -N (runs first) to 0{also('0')}",
    )
    parser.add_argument(
        "--requests-per-minute",
        type=int,
        metavar="N",
        help="requests per minute of all keys together; 0: no limit"
        + also("QUIRE_REQUESTS_PER_MINUTE"),
    )
    parser.add_argument(
        "--tokens-per-minute",
        type=int,
        metavar="N",
        help="tokens per minute, prompts and outputs together; 0: no limit"
        + also("QUIRE_TOKENS_PER_MINUTE"),
    )
    add_media_limits(parser, f"; 0: no limit{also('0')}")
    parser.add_argument(
        "--max-running-requests",
        type=int,
        metavar="N",
        help=f"maximum concurrent requests of the tenant; 0: no limit{also('0')}",
    )
    parser.add_argument(
        "--max-context-tokens",
        type=int,
        metavar="N",
        help=f"maximum tokens of a request, prompt plus output; 0: the model's limit{also('0')}",
    )
    parser.add_argument(
        "--allowed-models",
        type=comma_list,
        metavar="A,B",
        help=f"models that the tenant may use; '': all that it can access{also('all')}",
    )
    parser.add_argument(
        "--keep-conversations",
        type=yes_or_no,
        metavar="YES|NO",
        help=f"store playground conversations on the server{also('yes')}",
    )
    parser.add_argument(
        "--time-zone",
        metavar="ZONE",
        help=f"time zone of its budget periods, such as Europe/Berlin{also('UTC')}",
    )


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
