from typing import Any

from common.commands import QuireCommand
from tenants.models import User


class Command(QuireCommand):
    help = "List users with their tenants and roles."

    def handle(self, *args: Any, **options: Any) -> None:
        users = User.objects.prefetch_related("memberships__tenant").order_by("username")
        rows = [(user, user.email or "-", standing(user), roles(user)) for user in users]
        self.table(("NAME", "EMAIL", "STATE", "TENANTS"), rows)


def standing(user: User) -> str:
    """Role of a user in the installation."""
    if not user.is_active:
        return "deactivated"
    return "operator" if user.is_superuser else "staff" if user.is_staff else "active"


def roles(user: User) -> str:
    """`tenant:role` for each."""
    return ", ".join(f"{m.tenant}:{m.role}" for m in user.memberships.all()) or "-"
