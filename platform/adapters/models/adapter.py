"""A LoRA adapter: a name that a tenant gives to versions of weights."""

from django.core.validators import RegexValidator
from django.db import models

from catalog.models import ServedModel
from tenants.models import Tenant

#: No colon: `base:name` must be read in one way alone. Clients and proxies shorten paths, so a name
#: in one must be as short as it gets.
check_name = RegexValidator(
    r"\A(?!.*/\.{0,2}/)[A-Za-z0-9](?:[A-Za-z0-9._@/-]*[A-Za-z0-9])?\Z",
    "Letters, digits and . _ @ / - inside, but neither //, /./ nor /../.",
)


class Adapter(models.Model):
    """An adapter of a served model, a tenant's own or shared by all who may use the model.

    It is its versions' common name. What clients send is an alias's name; the first one has the
    adapter's own.
    """

    tenant = models.ForeignKey(
        Tenant,
        models.PROTECT,
        null=True,
        blank=True,
        related_name="adapters",
        help_text="Empty: shared by all who may use the model.",
    )
    served_model = models.ForeignKey(
        ServedModel,
        models.PROTECT,
        related_name="adapters",
        verbose_name="base model",
        help_text="The model that it was trained on.",
    )
    name = models.CharField(max_length=100, validators=[check_name])
    description = models.CharField(max_length=300, blank=True)
    pinned = models.BooleanField(
        default=False, help_text="What answers under its names stays in every replica's memory."
    )
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["name", "pk"]
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "served_model", "name"],
                condition=models.Q(tenant__isnull=False),
                name="one_adapter_a_name_of_a_tenant",
            ),
            models.UniqueConstraint(
                fields=["served_model", "name"],
                condition=models.Q(tenant__isnull=True),
                name="one_shared_adapter_a_name",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.served_model.name}:{self.name}"

    @property
    def owner(self) -> str:
        """The tenant's slug, "" for a shared one: the engine's quotas of memory go by it."""
        return self.tenant.slug if self.tenant is not None else ""
