"""A version of an adapter: weights by their digest, and what their check found."""

from django.db import models

from adapters.models.adapter import Adapter


class VersionState(models.TextChoices):
    """A version's life."""

    FETCHING = "fetching", "Being fetched"  # from the hub
    UPLOADED = "uploaded", "Waiting for its check"
    VALIDATING = "validating", "Being checked"  # header, shapes, numbers
    PROBING = "probing", "Being probed"  # prompts beside a plain merge
    READY = "ready", "Ready"
    LIVE = "live", "Live"  # an alias leads to it
    FAILED = "failed", "Refused"  # the report says why
    RETIRED = "retired", "Retired"  # kept, but not to be used


#: States of a version whose check has passed, so that it may answer.
PASSED = (VersionState.READY, VersionState.LIVE)
#: States in which a worker has it, or is about to.
WORKING = (
    VersionState.FETCHING,
    VersionState.UPLOADED,
    VersionState.VALIDATING,
    VersionState.PROBING,
)


class AdapterVersion(models.Model):
    """Weights as they were given once. What is stored under its digest never changes."""

    adapter = models.ForeignKey(Adapter, models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField(help_text="1 for an adapter's first.")
    digest = models.CharField(
        max_length=64, blank=True, db_index=True, help_text="Sha256 of configuration and weights."
    )
    state = models.CharField(
        max_length=10, choices=VersionState, default=VersionState.UPLOADED, db_index=True
    )
    report = models.JSONField(default=dict, blank=True, help_text="What the check found.")
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
        """Its first 12 hex digits, for people."""
        return self.digest[:12]

    @property
    def problem(self) -> str:
        """Why it was refused, "" if it wasn't."""
        error = self.report.get("error") if isinstance(self.report, dict) else None
        return str(error.get("message", "")) if isinstance(error, dict) else ""
