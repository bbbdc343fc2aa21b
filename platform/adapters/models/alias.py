"""An alias: a name that clients send, and which versions answer under it."""

from django.core.validators import MaxValueValidator
from django.db import models

from adapters.models.adapter import Adapter, check_name
from adapters.models.version import AdapterVersion
from catalog.models import ServedModel
from tenants.models import Tenant


class AdapterAlias(models.Model):
    """A pointer that can be turned at any time. Nothing is cached or billed by it.

    `tenant` and `served_model` are the adapter's, here too for the sake of the constraints.
    """

    adapter = models.ForeignKey(Adapter, models.CASCADE, related_name="aliases")
    tenant = models.ForeignKey(Tenant, models.PROTECT, null=True, blank=True, related_name="+")
    served_model = models.ForeignKey(ServedModel, models.CASCADE, related_name="+")
    name = models.CharField(max_length=100, validators=[check_name])
    version = models.ForeignKey(
        AdapterVersion, models.PROTECT, null=True, blank=True, related_name="live_as"
    )
    canary = models.ForeignKey(
        AdapterVersion,
        models.PROTECT,
        null=True,
        blank=True,
        related_name="canary_as",
        help_text="Canary version, which gets a share of the requests.",
    )
    canary_percent = models.PositiveSmallIntegerField(
        default=0,
        validators=[MaxValueValidator(99)],
        help_text="Percentage of the requests for the canary, 0 to 99.",
    )
    previous = models.ForeignKey(
        AdapterVersion,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="What a rollback turns to.",
    )
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        verbose_name = "alias"
        verbose_name_plural = "aliases"
        ordering = ["pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "served_model", "name"],
                condition=models.Q(tenant__isnull=False),
                name="one_alias_a_name_of_a_tenant",
            ),
            models.UniqueConstraint(
                fields=["served_model", "name"],
                condition=models.Q(tenant__isnull=True),
                name="one_shared_alias_a_name",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.served_model.name}:{self.name}"
