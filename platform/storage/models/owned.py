"""What all stored objects have: a public name, an owner, an end."""

from django.conf import settings
from django.db import models

from tenants.models import ApiKey, Tenant


class Owned(models.Model):
    """A tenant's object. `key` and `user`: who made it, as long as they exist."""

    public_id = models.CharField(max_length=64, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="+")
    key = models.ForeignKey(ApiKey, models.SET_NULL, null=True, blank=True, related_name="+")
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True, db_index=True)

    class Meta:
        abstract = True
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return self.public_id


class Leased(models.Model):
    """Work that one worker at a time may do. Whose lease has run out has lost it."""

    lease_owner = models.CharField(max_length=64, blank=True, editable=False)
    lease_until = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        abstract = True
