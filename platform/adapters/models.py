"""Adapters, their uploads, versions and aliases."""

from django.conf import settings
from django.core.validators import MaxValueValidator, RegexValidator
from django.db import models
from django_prometheus.models import ExportModelOperationsMixin

from catalog.models import ServedModel
from tenants.models import Tenant

#: No colon, so that `base:name` is unambiguous. Clients and proxies normalize paths, so a path in a
#: name must be in its normal form.
check_name = RegexValidator(
    r"\A(?!.*/\.{0,2}/)[A-Za-z0-9](?:[A-Za-z0-9._@/-]*[A-Za-z0-9])?\Z",
    "Letters, digits and . _ @ / - inside, but neither //, /./ nor /../.",
)


class Adapter(models.Model):
    """An adapter of a served model, a tenant's own or shared with all who may use the model.

    It groups its versions under one name. Clients send an alias's name; the first alias has the
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
        default=False, help_text="Whether the adapter stays in every replica's memory."
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
        """The tenant's slug, "" for a shared one; the engine's memory quotas use it."""
        return self.tenant.slug if self.tenant is not None else ""


class AdapterUpload(models.Model):
    """An upload in chunks. The partial files on disk show how much of each has arrived."""

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


class VersionState(models.TextChoices):
    FETCHING = "fetching", "Being fetched"  # from the hub
    UPLOADED = "uploaded", "Waiting for its check"
    VALIDATING = "validating", "Being checked"  # header, shapes, numbers
    PROBING = "probing", "Being probed"  # compares prompts with merged weights
    READY = "ready", "Ready"
    LIVE = "live", "Live"  # served under an alias
    FAILED = "failed", "Refused"  # the report says why
    RETIRED = "retired", "Retired"  # kept, but can't be promoted


#: States of a version whose check has passed, so that it can be served.
PASSED = (VersionState.READY, VersionState.LIVE)
#: States in which a worker processes it, or will soon.
WORKING = (
    VersionState.FETCHING,
    VersionState.UPLOADED,
    VersionState.VALIDATING,
    VersionState.PROBING,
)


class AdapterVersion(
    ExportModelOperationsMixin("adapterversion"),  # type: ignore[misc]
    models.Model,
):
    """Immutable weights: the content under a digest never changes."""

    adapter = models.ForeignKey(Adapter, models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField(help_text="1 for an adapter's first.")
    digest = models.CharField(
        max_length=64, blank=True, db_index=True, help_text="Sha256 of configuration and weights."
    )
    state = models.CharField(
        max_length=10, choices=VersionState, default=VersionState.UPLOADED, db_index=True
    )
    report = models.JSONField(default=dict, blank=True, help_text="Result of the check.")
    num_bytes = models.PositiveBigIntegerField("bytes", default=0)
    rank = models.PositiveIntegerField(null=True, blank=True)
    source = models.CharField(
        max_length=1000, help_text="`upload`, a path, or `hub:` and the repository."
    )
    promote_to = models.CharField(
        max_length=100, blank=True, help_text="The alias that it takes over once it's ready."
    )
    created_by = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    worked_at = models.DateTimeField(
        auto_now_add=True, help_text="Last heartbeat of the worker that processes it."
    )

    class Meta:
        ordering = ["adapter", "-number"]
        constraints = [
            models.UniqueConstraint(fields=["adapter", "number"], name="one_version_a_number"),
            models.UniqueConstraint(
                fields=["adapter", "digest"],
                condition=~models.Q(digest=""),
                name="one_version_a_content",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.adapter} version {self.number}"

    @property
    def short_digest(self) -> str:
        """The first 12 hexadecimal digits, for display."""
        return self.digest[:12]

    @property
    def problem(self) -> str:
        """Why its check failed, "" if it didn't."""
        error = self.report.get("error") if isinstance(self.report, dict) else None
        return str(error.get("message", "")) if isinstance(error, dict) else ""


class AdapterAlias(models.Model):
    """A pointer that can be changed at any time. Caches and bills use the digest instead.

    `tenant` and `served_model` are copies of the adapter's, for the constraints.
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
        help_text="Version that a rollback returns to.",
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
