"""Served models and their replicas."""

from typing import Any, cast

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django_prometheus.models import ExportModelOperationsMixin

from catalog.devices import visible_devices
from catalog.engine_settings import validate_engine_settings
from engine.contract.errors import ConfigError
from engine.contract.kv_transfer_config import (
    EC_CONSUMER,
    EC_PRODUCER,
    KV_BOTH,
    KV_CONSUMER,
    KV_PRODUCER,
    NATIVE,
)
from tenants.models import Tenant

#: Set from the row's columns or by the supervisor, never in `settings`.
RESERVED_SETTINGS = frozenset({"model", "served_model_name"})


class DesiredState(models.TextChoices):
    """The state that supervisors bring a model to."""

    LOADED = "loaded", "Loaded"
    UNLOADED = "unloaded", "Unloaded"


def check_engine_settings(settings: Any) -> None:
    """Raise ValidationError unless a model may be loaded with these settings."""
    if not isinstance(settings, dict):
        raise ValidationError("Must be a JSON object.")
    if reserved := RESERVED_SETTINGS & set(settings):
        raise ValidationError(f"{sorted(reserved)[0]} has a field of its own.")
    try:
        validate_engine_settings(settings)
    except ConfigError as error:
        raise ValidationError(error.message) from error


class ServedModel(ExportModelOperationsMixin("servedmodel"), models.Model):  # type: ignore[misc]
    """A model under its name for clients. Its replicas follow `desired_state`."""

    name = models.CharField(
        max_length=200,
        unique=True,
        validators=[
            RegexValidator(
                r"\A[A-Za-z0-9](?:[A-Za-z0-9._:@/-]*[A-Za-z0-9])?\Z",
                "Letters, digits and . _ : @ / - inside.",
            )
        ],
        help_text="Name that clients send as `model`.",
    )
    aliases = models.JSONField(
        default=list, blank=True, help_text="Other names that clients may send, a JSON list."
    )
    fallbacks = models.JSONField(
        default=list,
        blank=True,
        help_text="Models to use while no replica of this one serves, in this order.",
    )
    idle_minutes = models.PositiveIntegerField(
        default=0,
        validators=[MaxValueValidator(60 * 24 * 30)],
        help_text="Unload after N minutes without requests; the next request loads it again. "
        "0: never.",
    )
    idle_since = models.DateTimeField(null=True, blank=True, editable=False)
    source = models.CharField(max_length=1000, help_text="A folder, or an id on the hub.")
    settings = models.JSONField(
        default=dict,
        blank=True,
        help_text='Engine settings, such as {"max_model_len": 4096}.',
    )
    desired_state = models.CharField(
        max_length=10, choices=DesiredState, default=DesiredState.UNLOADED
    )
    num_replicas = models.PositiveSmallIntegerField(
        default=1,
        validators=[MinValueValidator(1), MaxValueValidator(64)],
        help_text="Replicas on each node that runs it.",
    )
    num_spares = models.PositiveSmallIntegerField(
        default=0,
        validators=[MaxValueValidator(64)],
        help_text="Hot-standby replicas per node.",
    )
    num_prefill = models.PositiveSmallIntegerField(
        default=0,
        validators=[MaxValueValidator(63)],
        help_text="Of the replicas, those that only compute prompts for the others.",
    )
    num_encode = models.PositiveSmallIntegerField(
        default=0,
        validators=[MaxValueValidator(63)],
        help_text="Of the replicas, those that only encode pictures and sound for the others.",
    )
    node = models.CharField(
        max_length=200, blank=True, help_text="Host whose supervisor runs it. Empty: every node."
    )
    managed = models.BooleanField(
        default=True, help_text="Off: replicas are started manually with `quire engine`."
    )
    public = models.BooleanField(default=True, help_text="Off: for the tenants below alone.")
    tenants = models.ManyToManyField(Tenant, blank=True, related_name="served_models")
    max_model_len = models.PositiveIntegerField(
        null=True, blank=True, editable=False, help_text="Context length, from its replicas."
    )
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def scales_from_zero(self) -> bool:
        """Whether an autoscaler, not a supervisor, starts its first replica for a request."""
        return not self.managed and self.idle_minutes > 0

    def clean(self) -> None:
        """Check names and engine settings. Django skips validators for `[]`, as it is empty."""
        self._check_aliases()
        self._check_fallbacks()
        try:
            check_engine_settings(self.settings)
            check_engine_settings({**self.settings, **self.group_settings})
        except ValidationError as error:
            raise ValidationError({"settings": error.messages}) from error
        if self.num_prefill:
            self._check_stage("num_prefill", "kv_transfer_config", "kv_role")
        if self.num_encode:
            self._check_stage("num_encode", "ec_transfer_config", "ec_role")

    def _check_stage(self, column: str, setting: str, role: str) -> None:
        """Raise ValidationError unless replicas can work for others, which gives them roles."""
        num_working = self.num_prefill + self.num_encode
        if num_working >= self.num_replicas:
            raise ValidationError(
                {
                    column: f"With it {num_working} replicas work for others, which must be fewer "
                    f"than all, {self.num_replicas}."
                }
            )
        if self.settings.get("kv_offloading_backend", NATIVE) == NATIVE:
            raise ValidationError(
                {
                    column: "Needs a kv_offloading_backend, the folder or URL that the "
                    "replicas share, and a kv_offloading_size."
                }
            )
        if role in (self.settings.get(setting) or {}):
            raise ValidationError(
                {column: f"Remove {role} from {setting}: replicas get their own."}
            )

    def _check_aliases(self) -> None:
        """Raise ValidationError if another model has one of these names."""
        aliases = self.aliases
        if not isinstance(aliases, list) or any(not isinstance(name, str) for name in aliases):
            raise ValidationError({"aliases": "Must be a JSON list of names."})
        name_field = cast("models.CharField[str, str]", self._meta.get_field("name"))
        for name in aliases:
            try:
                name_field.run_validators(name)
            except ValidationError as error:
                raise ValidationError({"aliases": error.messages}) from error
        names = {self.name, *aliases}
        if len(names) != 1 + len(aliases):
            raise ValidationError({"aliases": "A name is given twice."})
        # Another model of this name was just created: saving raises that conflict.
        for other in ServedModel.objects.exclude(pk=self.pk).exclude(name=self.name):
            if duplicates := names & {other.name, *other.aliases}:
                raise ValidationError(
                    {"aliases": f"{min(duplicates)} is a name of the model {other.name}."}
                )

    def _check_fallbacks(self) -> None:
        """Raise ValidationError unless these are other models in the catalogue."""
        fallbacks = self.fallbacks
        if not isinstance(fallbacks, list) or any(not isinstance(name, str) for name in fallbacks):
            raise ValidationError({"fallbacks": "Must be a list of models' names."})
        if self.name in fallbacks or len(set(fallbacks)) != len(fallbacks):
            raise ValidationError({"fallbacks": "Each must be another model, named once."})
        models = set(ServedModel.objects.filter(name__in=fallbacks).values_list("name", flat=True))
        if unknown := [name for name in fallbacks if name not in models]:
            raise ValidationError({"fallbacks": f"Model {unknown[0]!r} not found."})

    @property
    def engine_settings(self) -> dict[str, Any]:
        """All that `EngineConfig.from_mapping` needs for a replica of this model."""
        return {**self.settings, "model": self.source, "served_model_name": self.name}

    @property
    def runs_on_cpu(self) -> bool:
        """Whether a replica on this machine computes on its CPUs."""
        device: str = self.settings.get("device") or "auto"
        return device == "cpu" or (device == "auto" and not visible_devices())

    @property
    def group_settings(self) -> dict[str, Any]:
        """Settings of a node's replicas that have some of the experts each; {} for replicas that
        are on their own: a single one, those of several stages or machines or with EPLB, and those
        on GPUs.
        """
        size = self.num_replicas + self.num_spares
        stages = self.settings.get("pipeline_parallel_size") or 1
        ranks = self.settings.get("tensor_parallel_size") or 1
        is_spread = ranks > 1 and (
            (self.settings.get("nnodes") or 1) > 1
            or self.settings.get("distributed_executor_backend") == "ray"
        )
        is_isolated = stages > 1 or is_spread or self.settings.get("enable_eplb")
        is_isolated = is_isolated or not self.runs_on_cpu
        shares = self.settings.get("enable_expert_parallel") and not is_isolated
        if not shares or size == 1:
            return {}
        group: dict[str, Any] = {"data_parallel_size": size}
        if self.settings.get("distributed_executor_backend") in (None, "mp", "uni"):
            group["distributed_executor_backend"] = "external_launcher"
        return group

    def replica_settings(self, index: int) -> dict[str, Any]:
        """The same for one of its replicas. The first `num_prefill` compute prompts, the next
        `num_encode` encode.
        """
        settings = {**self.engine_settings, **self.group_settings}
        encodes = 0 <= index - self.num_prefill < self.num_encode
        if self.num_prefill:
            role = KV_BOTH if encodes else KV_CONSUMER
            role = KV_PRODUCER if index < self.num_prefill else role
            config = settings.get("kv_transfer_config") or {}
            settings["kv_transfer_config"] = {**config, "kv_role": role}
        if self.num_encode:
            role = EC_PRODUCER if encodes else EC_CONSUMER
            config = settings.get("ec_transfer_config") or {}
            settings["ec_transfer_config"] = {**config, "ec_role": role}
        return settings


class ReplicaState(models.TextChoices):
    """A replica's states. Routing uses the heartbeats in Redis; these rows are for display."""

    PENDING = "pending", "Pending"  # to be started, or waiting for a restart
    LOADING = "loading", "Loading"
    READY = "ready", "Ready"
    SLEEPING = "sleeping", "Sleeping"  # its memory is released, see `sleep_model`
    DRAINING = "draining", "Draining"  # finishes its streams, accepts no new requests
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
    restart_of = models.CharField(
        max_length=64,
        blank=True,
        editable=False,
        help_text="Incarnation to replace by a successor, as an operator asked.",
    )
    restarts = models.PositiveIntegerField(default=0)
    exits_last_hour = models.PositiveIntegerField(default=0, help_text="Unexpected exits.")
    last_exit = models.TextField(blank=True, help_text="Reason of the last unexpected exit.")
    last_seen = models.DateTimeField(null=True, blank=True)
    last_ready_at = models.DateTimeField(null=True, blank=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["replica_id"]

    def __str__(self) -> str:
        return self.replica_id


class McpServer(models.Model):
    """An MCP (Model Context Protocol) server with tools for the playground.

    `tools`: those of the last successful test; only these run (`catalog.mcp_client.list_tools`).
    `error`: of the last test, if it failed.
    """

    name = models.CharField(
        max_length=32,
        unique=True,
        validators=[
            RegexValidator(
                r"\A[a-z0-9](?:[a-z0-9-]*[a-z0-9])?\Z", "Lower-case letters, digits and - inside."
            )
        ],
        help_text="Name that its tools' names begin with.",
    )
    url = models.CharField(max_length=2000, help_text="Address of its streamable HTTP endpoint.")
    authorization = models.CharField(
        max_length=4000,
        blank=True,
        editable=False,
        help_text="Value of the Authorization header, such as `Bearer ...`.",
    )
    public = models.BooleanField(
        default=False, help_text="On: for every tenant. Off: for the tenants below alone."
    )
    tenants = models.ManyToManyField(Tenant, blank=True, related_name="mcp_servers")
    tools = models.JSONField(default=list, blank=True, editable=False)
    tested_at = models.DateTimeField(null=True, blank=True, editable=False)
    error = models.TextField(blank=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["name"]
        verbose_name = "MCP server"

    def __str__(self) -> str:
        return self.name
