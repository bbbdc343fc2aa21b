"""An upload under way: which files, how large, for which adapter."""

from django.conf import settings
from django.db import models

from catalog.models import ServedModel
from tenants.models import Tenant


class AdapterUpload(models.Model):
    """Files that come in pieces. How much of each is there, its partial file on disk tells."""

    public_id = models.CharField(max_length=64, unique=True)
    tenant = models.ForeignKey(Tenant, models.PROTECT, null=True, blank=True, related_name="+")
    served_model = models.ForeignKey(ServedModel, models.CASCADE, related_name="+")
    name = models.CharField(max_length=100, help_text="Name of the resulting adapter.")
    description = models.CharField(max_length=300, blank=True)
    files = models.JSONField(help_text="File name -> bytes.")
    num_bytes = models.PositiveBigIntegerField()
    promote = models.BooleanField(default=False, help_text="Take it live once it's ready.")
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    touched_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return self.public_id
