"""A replica as last seen."""

from django.db import models

from catalog.models.served_model import ServedModel


class ReplicaState(models.TextChoices):
    """A replica's life. Routing goes by heartbeats in Redis; these rows are for people."""

    PENDING = "pending", "Pending"  # to be started, or waiting to be started again
    LOADING = "loading", "Loading"
    READY = "ready", "Ready"
    SLEEPING = "sleeping", "Sleeping"  # its memory is given back, see `sleep_model`
    DRAINING = "draining", "Draining"  # finishes its streams, takes nothing new
    STOPPED = "stopped", "Stopped"
    FAILED = "failed", "Failed"  # `detail` says why


class Replica(models.Model):
    """A replica as last seen, mirrored from its supervisor and its heartbeat."""

    served_model = models.ForeignKey(ServedModel, models.CASCADE, related_name="replicas")
    replica_id = models.CharField(max_length=255, unique=True)
    state = models.CharField(max_length=10, choices=ReplicaState, default=ReplicaState.PENDING)
    detail = models.TextField(blank=True)
    pid = models.PositiveIntegerField(null=True, blank=True)
    host = models.CharField(max_length=255, blank=True)
    incarnation = models.CharField(max_length=64, blank=True)
    restarts = models.PositiveIntegerField(default=0)
    last_exit = models.TextField(blank=True, help_text="Reason of the last unexpected exit.")
    last_seen = models.DateTimeField(null=True, blank=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["replica_id"]

    def __str__(self) -> str:
        return self.replica_id
