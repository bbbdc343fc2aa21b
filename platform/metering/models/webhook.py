"""Where a tenant wants to be told."""

from django.db import models

from tenants.models import Tenant


class Webhook(models.Model):
    """A tenant's address for events. The secret signs them; it's shown to who sets it, once."""

    tenant = models.OneToOneField(Tenant, models.CASCADE, related_name="webhook")
    url = models.CharField(max_length=2000)
    secret = models.CharField(max_length=64, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.tenant}: {self.url}"
