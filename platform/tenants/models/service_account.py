"""A program that belongs to a tenant."""

from django.conf import settings
from django.db import models

from tenants.models.membership import Role
from tenants.models.tenant import Tenant


class ServiceAccount(models.Model):
    """A program that belongs to a tenant: its keys outlive the people who made them."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="service_accounts")
    name = models.CharField(max_length=100)
    role = models.CharField(max_length=10, choices=Role, default=Role.MEMBER)
    active = models.BooleanField(default=True)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name", "pk"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="one_service_account_a_name")
        ]

    def __str__(self) -> str:
        return self.name
