"""Tenants, members, API keys, users and the audit log."""

import hashlib
import hmac
import math
import secrets
from datetime import datetime
from typing import Any, ClassVar

from django.conf import settings
from django.contrib.auth.models import AbstractUser, UserManager
from django.core.exceptions import ValidationError
from django.core.serializers.json import DjangoJSONEncoder
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models, transaction
from django.utils import timezone
from django.utils.crypto import salted_hmac
from django_prometheus.models import ExportModelOperationsMixin

from tenants import api_keys
from tenants.api_keys import default_scopes
from tenants.caller import MediaLimits
from tenants.validators import (
    validate_addresses,
    validate_endpoints,
    validate_models,
    validate_time_zone,
)

SALT_BYTES = 32
#: Budgets of a month count single requests in time zones whose days begin between whole hours.
MIN_USAGE_DAYS = 35


def new_salt() -> str:
    """256 random bits in hex."""
    return secrets.token_hex(SALT_BYTES)


def check_finite(value: float) -> None:
    """Reject NaN, which passes every minimum and maximum. Raises ValidationError."""
    if not math.isfinite(value):
        raise ValidationError("Must be a finite number.")


class HasMediaLimits(models.Model):
    """Limits per minute on the images, videos, documents and audio files of requests."""

    media_per_minute = models.PositiveBigIntegerField(
        "media per minute",
        null=True,
        blank=True,
        help_text="Images, videos, documents and audio files. Empty: no limit.",
    )
    media_bytes_per_minute = models.PositiveBigIntegerField(
        "media bytes per minute",
        null=True,
        blank=True,
        help_text="Bytes of those files. Empty: no limit.",
    )
    media_seconds_per_minute = models.PositiveBigIntegerField(
        "media seconds per minute",
        null=True,
        blank=True,
        help_text="Seconds that decoding them takes. Empty: no limit.",
    )

    class Meta:
        abstract = True

    @property
    def media_limits(self) -> MediaLimits:
        """The three limits."""
        return MediaLimits(
            self.media_per_minute, self.media_bytes_per_minute, self.media_seconds_per_minute
        )


class Tenant(ExportModelOperationsMixin("tenant"), HasMediaLimits):  # type: ignore[misc]
    """The owner of requests, cache and costs. Deactivated, never deleted: the ledger names it."""

    slug = models.CharField(
        max_length=63,
        unique=True,
        validators=[
            RegexValidator(
                r"\A[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\Z",
                "Lower-case letters, digits and hyphens; a letter or digit first and last.",
            )
        ],
        help_text="Short name for commands and addresses, such as `acme`.",
    )
    name = models.CharField(max_length=200)
    active = models.BooleanField(
        default=True, help_text="Off: its keys and members are refused within seconds."
    )
    weight = models.FloatField(
        default=1.0,
        validators=[check_finite, MinValueValidator(0.01), MaxValueValidator(1000.0)],
        help_text="Share of the engine when it's busy, relative to other tenants (0.01 to 1000).",
    )
    kv_reserved_fraction = models.FloatField(
        "KV cache reserved",
        default=0.0,
        validators=[check_finite, MinValueValidator(0.0), MaxValueValidator(1.0)],
        help_text="Part of each replica's KV cache that others leave free for this tenant "
        "(0 to 1).",
    )
    kv_max_fraction = models.FloatField(
        "KV cache at most",
        default=1.0,
        validators=[check_finite, MinValueValidator(0.01), MaxValueValidator(1.0)],
        help_text="Part of each replica's KV cache that this tenant may use (0.01 to 1).",
    )
    max_priority = models.PositiveIntegerField(
        default=0,
        validators=[MaxValueValidator(1000)],
        help_text="Highest priority that requests may set: from -N (runs first) to 0.",
    )
    requests_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Empty: the installation's default."
    )
    tokens_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="Prompt and output together. Empty: the default."
    )
    max_running_requests = models.PositiveIntegerField(
        null=True, blank=True, help_text="Maximum concurrent requests. Empty: no limit."
    )
    max_context_tokens = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="Maximum tokens of prompt plus output. Empty: the model's limit.",
    )
    allowed_models = models.JSONField(
        default=list,
        blank=True,
        validators=[validate_models],
        help_text='Restrict the tenant to these models, such as ["small"]. Empty: all it '
        "can access.",
    )
    time_zone = models.CharField(
        max_length=64,
        default="UTC",
        validators=[validate_time_zone],
        help_text="Time zone of the tenant's budget periods, such as `Europe/Berlin`.",
    )
    keep_usage_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(MIN_USAGE_DAYS), MaxValueValidator(36_500)],
        help_text="Days to keep single requests in the usage ledger; hourly and daily sums stay. "
        "Empty: forever.",
    )
    keep_content_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(36_500)],
        help_text="Days to keep files, batches and stored responses. Empty: each object's own "
        "expiry.",
    )
    store_prompts = models.BooleanField(
        "store prompts",
        default=False,
        help_text="Store prompts and completions with request logs, for at most 30 days. Owners "
        "and admins of the tenant can read them. Where the operator logs requests, replicas' "
        "logs have the start of prompts, too.",
    )
    keep_conversations = models.BooleanField(
        default=True,
        help_text="Store playground conversations on the server. Off: only in the browser.",
    )
    salt = models.CharField(max_length=64, default=new_salt, editable=False)
    erase_requested_at = models.DateTimeField(null=True, blank=True, editable=False)
    erased_at = models.DateTimeField(null=True, blank=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["slug"]
        constraints = [
            models.CheckConstraint(condition=models.Q(weight__gt=0), name="tenant_weight_positive")
        ]

    def __str__(self) -> str:
        return self.slug

    @property
    def cache_namespace(self) -> str:
        """Separates the tenant's prefixes in the KV cache: [32] hex, a hash of the salt."""
        key = bytes.fromhex(self.salt)
        return hmac.new(key, b"quire kv cache namespace", hashlib.sha256).hexdigest()[:32]


class Role(models.TextChoices):
    """A member's role; each includes the ones after it."""

    OWNER = "owner", "Owner"  # and members of any role
    ADMIN = "admin", "Admin"  # and all keys, members up to admin, the audit log
    MEMBER = "member", "Member"  # and generate, their own keys
    VIEWER = "viewer", "Viewer"  # look at models and usage

    @property
    def rank(self) -> int:
        """A higher rank includes more permissions."""
        return [Role.VIEWER, Role.MEMBER, Role.ADMIN, Role.OWNER].index(self)


class Membership(models.Model):
    """A user's membership in a tenant."""

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


class Invitation(models.Model):
    """A link by which one person joins a tenant, once. The database stores only its hash."""

    tenant = models.ForeignKey(Tenant, models.CASCADE, related_name="invitations")
    email = models.EmailField()
    role = models.CharField(max_length=10, choices=Role, default=Role.MEMBER)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, null=True, blank=True, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True, blank=True)
    accepted_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return self.email

    def state(self, now: datetime | None = None) -> str:
        """ "open", "accepted", "revoked" or "expired"."""
        if self.accepted_at is not None:
            return "accepted"
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at <= (now or timezone.now()) else "open"


class ServiceAccount(models.Model):
    """A program that belongs to a tenant: its keys outlive the accounts of their creators."""

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


class ApiKey(ExportModelOperationsMixin("apikey"), HasMediaLimits):  # type: ignore[misc]
    """A tenant's key: `tenants.api_keys` describes its form and why a fast hash is enough.

    Its holder is a service account, or the user who created it, with whom it ends, or (if created
    by a command) the tenant itself.
    """

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="api_keys")
    name = models.CharField(max_length=100, blank=True, help_text="Purpose of the key.")
    public_id = models.CharField(max_length=16, unique=True, editable=False)
    digest = models.CharField(max_length=64, editable=False)
    scopes = models.JSONField(default=default_scopes)
    requests_per_minute = models.PositiveBigIntegerField(
        null=True, blank=True, help_text="A limit of this key alone, within the tenant's."
    )
    tokens_per_minute = models.PositiveBigIntegerField(null=True, blank=True)
    max_running_requests = models.PositiveIntegerField(
        null=True, blank=True, help_text="Maximum concurrent requests. Empty: no limit."
    )
    max_context_tokens = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="Maximum tokens of prompt and output together. Empty: the model's limit.",
    )
    allowed_models = models.JSONField(
        default=list,
        blank=True,
        validators=[validate_models],
        help_text='Models that it may use, such as ["small", "large"]. Empty: the tenant\'s.',
    )
    endpoints = models.JSONField(
        default=list,
        blank=True,
        validators=[validate_endpoints],
        help_text='Paths that it may ask, such as ["/v1/embeddings"]. Empty: all.',
    )
    addresses = models.JSONField(
        default=list,
        blank=True,
        validators=[validate_addresses],
        help_text='Client networks allowed to use the key, such as ["10.0.0.0/8"]. Empty: any.',
    )
    first = models.ForeignKey(
        "self",
        models.PROTECT,
        null=True,
        blank=True,
        editable=False,
        related_name="successors",
        help_text="First key of this rotation chain; limits and budgets are shared along it.",
    )
    created_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, editable=False
    )
    service_account = models.ForeignKey(
        ServiceAccount, models.PROTECT, null=True, blank=True, related_name="api_keys"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True, blank=True, help_text="Empty: never.")
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)
    last_used_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Updated at most once a minute."
    )

    class Meta:
        verbose_name = "API key"
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return f"{self.prefix} ({self.name})" if self.name else self.prefix

    @property
    def prefix(self) -> str:
        """The part that may be displayed: enough to recognize the key, not to use it."""
        return f"{api_keys.PREFIX}{self.public_id}..."

    def state(self, now: datetime | None = None) -> str:
        """ "active", "revoked" or "expired"."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= (now or timezone.now()):
            return "expired"
        return "active"


class AppendOnly(Exception):
    """Raised by attempts to change or delete an audit entry."""


class ActorKind(models.TextChoices):
    PERSON = "person", "Person"
    KEY = "key", "API key"
    COMMAND = "command", "Command"
    SYSTEM = "system", "System"


class AuditQuerySet(models.QuerySet):
    """Allows only reading and adding."""

    def update(self, **kwargs: Any) -> int:
        raise AppendOnly("Audit entries can't be changed.")

    def bulk_update(self, *args: Any, **kwargs: Any) -> int:
        raise AppendOnly("Audit entries can't be changed.")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise AppendOnly("Audit entries can't be deleted.")


class AuditEntry(models.Model):
    """An audited action. Rows never change; only `tenants.audit_retention` deletes them.

    `details["changes"]` holds `{field: [before, after]}`. Actor and key have no constraints:
    entries stay, under their ids, after they are deleted.
    """

    at = models.DateTimeField(auto_now_add=True, db_index=True)
    actor = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.DO_NOTHING,
        db_constraint=False,
        null=True,
        blank=True,
        related_name="+",
    )
    actor_kind = models.CharField(max_length=10, choices=ActorKind, default=ActorKind.SYSTEM)
    actor_label = models.CharField(max_length=200)
    actor_key = models.ForeignKey(
        ApiKey, models.DO_NOTHING, db_constraint=False, null=True, blank=True, related_name="+"
    )
    address = models.CharField(max_length=45, blank=True, help_text="Client IP address.")
    tenant = models.ForeignKey(Tenant, models.PROTECT, null=True, blank=True, related_name="+")
    action = models.CharField(max_length=60, db_index=True)
    target_type = models.CharField(max_length=60)
    target_id = models.CharField(max_length=60)
    target_label = models.CharField(max_length=250)
    details = models.JSONField(default=dict, encoder=DjangoJSONEncoder)

    objects = AuditQuerySet.as_manager()

    class Meta:
        verbose_name_plural = "audit entries"
        ordering = ["-pk"]

    def __str__(self) -> str:
        return f"{self.actor_label}: {self.action} {self.target_label}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk is not None:
            raise AppendOnly("An audit entry can't be changed.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise AppendOnly("An audit entry can't be deleted.")


class QuireUserManager(UserManager):
    """Django's manager, whose `manage.py createsuperuser` writes an audit row, too."""

    use_in_migrations = False

    def create_superuser(
        self, username: str, email: str | None = None, password: str | None = None, **more: Any
    ) -> Any:
        """Create an operator at the command line; the actions create all other users."""
        from tenants.actors import CLI_ACTOR
        from tenants.audit import log_action

        with transaction.atomic(using=self.db):
            user = super().create_superuser(username, email, password, **more)
            changes = {"username": [None, username], "is_superuser": [None, True]}
            log_action(CLI_ACTOR, "user.create", user, changes=changes)
        return user


class User(AbstractUser):
    """Django's user, whose sessions can all be ended at once."""

    objects: ClassVar[QuireUserManager] = QuireUserManager()

    operator_by_sign_on = models.BooleanField(
        default=False,
        editable=False,
        help_text="Operator role granted by a group of the identity provider.",
    )
    session_epoch = models.PositiveIntegerField(default=0, editable=False)

    def _get_session_auth_hash(self, secret: str | None = None) -> str:
        """Hash that a session must hold: a new password or a new epoch ends all sessions.

        Django compares it at every request, so that a session ends everywhere at once, even one
        that we don't know of.
        """
        salt = "tenants.models.User.get_session_auth_hash"
        value = f"{self.password}\0{self.session_epoch}"
        return salted_hmac(salt, value, secret=secret, algorithm="sha256").hexdigest()
