"""A user's place in a tenant."""

from django.conf import settings
from django.db import models

from tenants.models.tenant import Tenant


class Role(models.TextChoices):
    """What a member may do; each includes the ones after it."""

    OWNER = "owner", "Owner"  # and members of any role
    ADMIN = "admin", "Admin"  # and all keys, members up to admin, the audit log
    MEMBER = "member", "Member"  # and generate, keys of their own
    VIEWER = "viewer", "Viewer"  # look at models and usage

    @property
    def rank(self) -> int:
        """Higher may do more."""
        return [Role.VIEWER, Role.MEMBER, Role.ADMIN, Role.OWNER].index(self)


class Membership(models.Model):
    """A user's place in a tenant."""

    tenant = models.ForeignKey(Tenant, models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=Role, default=Role.MEMBER)
    by_sign_on = models.BooleanField(
        default=False, editable=False, help_text="Granted by a group of the identity provider."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["created_at", "pk"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "user"], name="one_membership_a_tenant")
        ]

    def __str__(self) -> str:
        return f"{self.user} in {self.tenant} ({self.role})"
