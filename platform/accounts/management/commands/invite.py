from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from django.urls import get_script_prefix, reverse

from accounts.invitation_mail import mail_invitation
from common.commands import QuireCommand
from common.files import instance_url
from common.installation import PROGRAM
from tenants import actions
from tenants.actors import CLI_ACTOR
from tenants.cli import add_role_option, add_tenant_option, find_tenant


class Command(QuireCommand):
    help = (
        "Invite a user to a tenant and print the link once. The link works once, for a week. "
        "With QUIRE_SMTP_URL set, it is mailed too."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("email", help="email address of the user")
        add_tenant_option(parser)
        add_role_option(parser)
        parser.add_argument(
            "--url",
            help="URL of this instance, such as https://quire.example/quire (default: "
            f"what {PROGRAM} up serves in this data dir)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        base = options["url"] or instance_url(settings.DATA_DIR)
        if not base.startswith(("http://", "https://")):
            raise CommandError("Name --url: no instance runs in this data dir.")
        created = actions.invite(
            actor=CLI_ACTOR,
            tenant=find_tenant(options["tenant"]),
            email=options["email"],
            role=options["role"],
        )
        path = reverse("invitation", args=[created.token]).removeprefix(get_script_prefix())
        link = f"{base.rstrip('/')}/{path}"
        self.stdout.write(link)
        mailed = mail_invitation(created.invitation, link)
        self.print_hint(
            f"{'It was mailed too' if mailed else 'No mail was sent'}: keep it to yourself."
        )
