"""Served models in the management API."""

from __future__ import annotations

import redis
from django.db import transaction
from django.db.models import QuerySet
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, serializers, status
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response

from catalog import actions, model_details
from catalog.access import access_catalog
from catalog.hub import get_download_info, search_hub
from catalog.models import Replica, ServedModel
from common.errors import NotFound, ServiceUnavailable
from history.benchmarks import (
    BenchmarkRun,
    access_benchmark,
    access_benchmarks,
    start_benchmark,
    stop_benchmark,
)
from inference.api.benchmarks import enqueue_benchmark
from management_api.people import ManagementViewSet
from tenants.access import access_tenant, require_operator
from tenants.models import Tenant

COLUMNS = (
    *("num_replicas", "num_spares", "num_prefill", "num_encode", "node", "managed"),
    *("public", "aliases", "fallbacks", "idle_minutes"),
)


class ServedModelSerializer(serializers.ModelSerializer):
    """A served model; `tenants` are those that may use it if it isn't public."""

    tenants: serializers.SlugRelatedField[Tenant] = serializers.SlugRelatedField(
        "slug", many=True, read_only=True
    )

    class Meta:
        model = ServedModel
        fields = (
            *("id", "name", "source", "settings", "desired_state", *COLUMNS, "tenants"),
            *("idle_since", "max_model_len", "created_at", "changed_at"),
        )
        read_only_fields = (
            *("desired_state", "idle_since", "max_model_len", "created_at"),
            "changed_at",
        )
        extra_kwargs = {
            "name": {"validators": []},
            "aliases": {"required": False},
            "fallbacks": {"required": False},
        }


class ServedModelUpdateSerializer(serializers.ModelSerializer):
    """Changes of a model; its replicas restart if engine settings change."""

    tenants = serializers.ListField(child=serializers.CharField(max_length=63), required=False)

    class Meta:
        model = ServedModel
        fields = ("source", "settings", *COLUMNS, "tenants")


class ModelSleepSerializer(serializers.Serializer):
    """Sleep level: 1 keeps the weights in host memory, 2 discards and reloads them."""

    level = serializers.ChoiceField((1, 2), default=1)


class BenchmarkSerializer(serializers.ModelSerializer):
    """A benchmark; `results`: figures of the completed levels."""

    id = serializers.CharField(source="public_id")

    class Meta:
        model = BenchmarkRun
        fields = (
            *("id", "status", "levels", "input_tokens", "output_tokens", "num_requests"),
            *("results", "error", "created_by", "created_at", "finished_at"),
        )


class BenchmarkStartSerializer(serializers.Serializer):
    """Concurrency levels, run one after the other, and the tokens of each request."""

    levels = serializers.ListField(child=serializers.IntegerField())
    input_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()
    num_requests = serializers.IntegerField(help_text="Requests of each level.")


class BenchmarkNameSerializer(serializers.Serializer):
    """The id of a benchmark."""

    benchmark = serializers.CharField(max_length=64)


class MemoryEstimateQuerySerializer(serializers.Serializer):
    """Number of sequences and their context in tokens; 0 stands for the maximum context."""

    sequences = serializers.IntegerField(
        default=1, min_value=1, max_value=model_details.MAX_SEQUENCES
    )
    context = serializers.IntegerField(  # type: ignore[assignment]  # a JSON field
        default=0, min_value=0, max_value=model_details.MAX_CONTEXT_TOKENS
    )


class DownloadSerializer(serializers.Serializer):
    """A model's download from the hub; `there` of its `nbytes` are in the host's cache."""

    repository = serializers.CharField()
    commit = serializers.CharField()
    files = serializers.IntegerField()
    nbytes = serializers.IntegerField()
    there = serializers.IntegerField(source="cached_bytes")
    room = serializers.IntegerField(
        source="free_bytes", help_text="Bytes that are free on the disk."
    )
    fits = serializers.BooleanField()


class HubQuerySerializer(serializers.Serializer):
    """A search for models by name."""

    q = serializers.CharField(max_length=200)


class HubModelSerializer(serializers.Serializer):
    """A model of the hub; `nbytes` and `fits` are null if its size is unknown."""

    source = serializers.CharField()  # type: ignore[assignment]  # a JSON field
    nbytes = serializers.IntegerField(allow_null=True)
    license = serializers.CharField()
    downloads = serializers.IntegerField()
    architecture = serializers.CharField()
    task = serializers.CharField()
    gated = serializers.BooleanField()
    fits = serializers.BooleanField(allow_null=True)


class MemoryEstimateSerializer(serializers.Serializer):
    """Sizes in bytes, estimated from the checkpoint's headers; null if unknown."""

    weights = serializers.IntegerField()
    kv_per_token = serializers.IntegerField(allow_null=True)
    context = serializers.IntegerField()  # type: ignore[assignment]  # a JSON field
    sequences = serializers.IntegerField()
    kv = serializers.IntegerField()
    kv_pool = serializers.IntegerField()
    full_sequences = serializers.FloatField(allow_null=True)
    num_ranks = serializers.IntegerField()
    per_rank = serializers.IntegerField()
    total = serializers.IntegerField()
    available = serializers.IntegerField()
    host = serializers.CharField()
    fits = serializers.BooleanField()


class ReplicaSerializer(serializers.Serializer):
    """The current state of a replica; `phase` while it loads, with bytes if they are known."""

    id = serializers.CharField()
    state = serializers.CharField()
    detail = serializers.CharField()
    host = serializers.CharField()
    pid = serializers.IntegerField(allow_null=True)
    restarts = serializers.IntegerField()
    last_exit = serializers.CharField()
    phase = serializers.CharField()
    bytes_done = serializers.IntegerField()
    bytes_total = serializers.IntegerField()
    load_progress = serializers.FloatField()
    num_ranks = serializers.IntegerField()
    collective_seconds = serializers.FloatField()


class ReplicaNameSerializer(serializers.Serializer):
    """The id of a replica."""

    replica = serializers.CharField(max_length=255)


class LogQuerySerializer(ReplicaNameSerializer):
    """The id of a replica, and of the log line to continue after."""

    after = serializers.CharField(required=False, default="", allow_blank=True, max_length=64)


class LogLineSerializer(serializers.Serializer):
    """A line of the log; `at`: time in seconds since the epoch."""

    id = serializers.CharField()
    at = serializers.FloatField()
    text = serializers.CharField()


class ServedModelViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """The model catalogue. For operators; others list models with `/v1/models`."""

    queryset = ServedModel.objects.all()
    serializer_class = ServedModelSerializer
    filterset_fields = ("name", "desired_state", "public")

    def get_visible_queryset(self) -> QuerySet[ServedModel]:
        return access_catalog(self.actor)

    @extend_schema(request=ServedModelSerializer, responses={201: ServedModelSerializer})
    def create(self, request: Request) -> Response:
        """Load a model: a new one, or one that was unloaded."""
        require_operator(self.actor)
        model = actions.load_model(actor=self.actor, **self.validate_body(ServedModelSerializer))
        return Response(ServedModelSerializer(model).data, status.HTTP_201_CREATED)

    @extend_schema(
        request=ServedModelUpdateSerializer(partial=True), responses=ServedModelSerializer
    )
    @transaction.atomic
    def partial_update(self, request: Request, pk: str) -> Response:
        """Change the given fields."""
        row = self.row()
        serializer = ServedModelUpdateSerializer(row, data=request.data, partial=True)
        values = self.validated(serializer)
        named = values.pop("tenants", None)
        saved = actions.update_model(actor=self.actor, model=row, **values)
        if named is not None:
            tenants: list[Tenant] = [access_tenant(self.actor, slug) for slug in named]
            saved = actions.share_model(
                actor=self.actor, model=saved, tenants=tenants, public=saved.public
            )
        return Response(ServedModelSerializer(saved).data)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, pk: str) -> Response:
        """Remove an unloaded model from the catalogue."""
        actions.delete_model(actor=self.actor, model=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=None, responses=ServedModelSerializer)
    @action(detail=True, methods=["post"])
    def load(self, request: Request, pk: str) -> Response:
        """Load the model again."""
        saved = actions.load_model(actor=self.actor, name=self.row().name)
        return Response(ServedModelSerializer(saved).data)

    @extend_schema(request=None, responses=ServedModelSerializer)
    @action(detail=True, methods=["post"])
    def unload(self, request: Request, pk: str) -> Response:
        """Drain and stop the model's replicas."""
        saved = actions.unload_model(actor=self.actor, model=self.row())
        return Response(ServedModelSerializer(saved).data)

    @extend_schema(request=ModelSleepSerializer, responses=ServedModelSerializer)
    @action(detail=True, methods=["post"])
    def sleep(self, request: Request, pk: str) -> Response:
        """Free the model's memory until it's woken up."""
        row = self.row()
        actions.sleep_model(actor=self.actor, model=row, **self.validate_body(ModelSleepSerializer))
        return Response(ServedModelSerializer(row).data)

    @extend_schema(request=None, responses=ServedModelSerializer)
    @action(detail=True, methods=["post"])
    def wake(self, request: Request, pk: str) -> Response:
        """Allocate the model's memory again."""
        row = self.row()
        actions.wake_model(actor=self.actor, model=row)
        return Response(ServedModelSerializer(row).data)

    @extend_schema(request=ReplicaNameSerializer, responses=ReplicaSerializer)
    @action(detail=True, methods=["post"])
    def restart(self, request: Request, pk: str) -> Response:
        """Drain and restart one replica."""
        row = self.row()
        name = self.validate_body(ReplicaNameSerializer)["replica"]
        replica = Replica.objects.filter(served_model=row, replica_id=name).first()
        if replica is None:
            raise NotFound("Replica not found.", param="replica")
        actions.drain_replica(actor=self.actor, replica=replica)
        return Response(ReplicaSerializer(model_details.replica_row(replica, None)).data)

    @extend_schema(responses=ReplicaSerializer(many=True))
    @action(detail=True, methods=["get"], pagination_class=None, filter_backends=[])
    def replicas(self, request: Request, pk: str) -> Response:
        """The model's replicas: states, load phases, reasons for exits."""
        rows = model_details.replica_status_list(self.row(), model_details.get_heartbeats())
        return Response(ReplicaSerializer(rows, many=True).data)

    @extend_schema(parameters=[MemoryEstimateQuerySerializer], responses=MemoryEstimateSerializer)
    @action(detail=True, methods=["get"])
    def need(self, request: Request, pk: str) -> Response:
        """Memory that a replica needs, and whether the gateway's host has enough. For a model that
        isn't downloaded yet, the headers of its weights are read from the hub.
        """
        row = self.row()
        asked = MemoryEstimateQuerySerializer(data=request.query_params)
        asked.is_valid(raise_exception=True)
        checkpoint = model_details.checkpoint_of(row.source, row.settings)
        if checkpoint is None and model_details.is_on_hub(row.source):
            checkpoint = get_download_info(row.source, row.settings).checkpoint
        if checkpoint is None:
            raise NotFound("Memory needs are unknown: the model's files are not on this host.")
        values = {name: value or "" for name, value in asked.validated_data.items()}
        return Response(
            MemoryEstimateSerializer(
                model_details.estimate_memory_for_form(checkpoint, row.settings, values)
            ).data
        )

    @extend_schema(responses=DownloadSerializer)
    @action(detail=True, methods=["get"])
    def download(self, request: Request, pk: str) -> Response:
        """The model's download from the hub, and whether the gateway's disk has enough space."""
        row = self.row()
        if not model_details.is_on_hub(row.source):
            raise NotFound("It comes from a folder, not from the hub.")
        return Response(DownloadSerializer(get_download_info(row.source, row.settings)).data)

    @extend_schema(responses=BenchmarkSerializer(many=True))
    @action(detail=True, methods=["get"], pagination_class=None, filter_backends=[])
    def benchmarks(self, request: Request, pk: str) -> Response:
        """The model's benchmarks, newest first."""
        rows = access_benchmarks(self.actor, self.row())
        return Response(BenchmarkSerializer(rows, many=True).data)

    @extend_schema(request=BenchmarkStartSerializer, responses={201: BenchmarkSerializer})
    @benchmarks.mapping.post
    def start_benchmark(self, request: Request, pk: str) -> Response:
        """Start a benchmark. A model can have only one open benchmark at a time."""
        row = self.row()
        values = self.validate_body(BenchmarkStartSerializer)
        run = start_benchmark(actor=self.actor, model=row, **values)
        transaction.on_commit(lambda: enqueue_benchmark(run.public_id))
        return Response(BenchmarkSerializer(run).data, status.HTTP_201_CREATED)

    @extend_schema(request=BenchmarkNameSerializer, responses=BenchmarkSerializer)
    @action(detail=True, methods=["post"], url_path="benchmarks/stop")
    def stop_benchmark(self, request: Request, pk: str) -> Response:
        """Stop a benchmark; its results so far remain."""
        row = self.row()
        name = self.validate_body(BenchmarkNameSerializer)["benchmark"]
        run = stop_benchmark(actor=self.actor, run=access_benchmark(self.actor, row, name))
        return Response(BenchmarkSerializer(run).data)

    @extend_schema(parameters=[HubQuerySerializer], responses=HubModelSerializer(many=True))
    @action(detail=False, methods=["get"], pagination_class=None, filter_backends=[])
    def hub(self, request: Request) -> Response:
        """The most downloaded models of the hub that match the search."""
        require_operator(self.actor)
        asked = HubQuerySerializer(data=request.query_params)
        asked.is_valid(raise_exception=True)
        rows = search_hub(asked.validated_data["q"])
        return Response(HubModelSerializer(rows, many=True).data)

    @extend_schema(parameters=[LogQuerySerializer], responses=LogLineSerializer(many=True))
    @action(detail=True, methods=["get"], pagination_class=None, filter_backends=[])
    def log(self, request: Request, pk: str) -> Response:
        """The end of a replica's log, or the lines after a given one."""
        row, asked = self.row(), LogQuerySerializer(data=request.query_params)
        asked.is_valid(raise_exception=True)
        query = asked.validated_data
        try:
            lines = model_details.log_of(row, query["replica"], query["after"])
        except redis.RedisError as error:
            raise ServiceUnavailable("The log is unavailable: no connection to Redis.") from error
        return Response(LogLineSerializer(lines, many=True).data)
