"""Adapters in the management API: chunked uploads, versions, aliases, and a request's digest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import Prefetch, QuerySet
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import mixins, status
from rest_framework.decorators import action
from rest_framework.parsers import BaseParser, JSONParser
from rest_framework.request import Request
from rest_framework.response import Response

from adapters import access, actions
from adapters.access import access_request
from adapters.models import Adapter, AdapterAlias, AdapterUpload, AdapterVersion
from catalog.access import access_served_models
from catalog.models import ServedModel
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from inference.errors import PayloadTooLarge
from management_api import serializers
from management_api.people import TenantMixin
from management_api.serializers import MAX_PIECE_BYTES
from metering.models import UsageEntry
from tenants.models import Tenant

CHUNK = 1 << 16


class RawBodyParser(BaseParser):
    """Leaves the body, a chunk of a file, to the view, which reads it in small parts."""

    media_type = "application/octet-stream"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        return stream


def find_model(tenant: Tenant | None, name: str) -> ServedModel:
    """Return a model that the tenant may use. Raises `NotFound`."""
    rows = ServedModel.objects.all() if tenant is None else access_served_models(tenant)
    model = rows.filter(name=name).first()
    if model is None:
        raise NotFound(f"Model {name[:200]!r} not found.", param="model")
    return model


class AdapterViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """A tenant's adapters and those shared with it. Members add versions; admins promote them."""

    queryset = Adapter.objects.all()
    serializer_class = serializers.AdapterSerializer
    filterset_fields = ("name", "served_model__name")

    @property
    def owner(self) -> Tenant | None:
        """Owner of new adapters; None for shared ones."""
        return self.tenant

    def get_visible_queryset(self) -> QuerySet[Adapter]:
        return _full_queryset(access.access_adapters(self.actor, self.owner))

    @extend_schema(
        request=serializers.AdapterCreateSerializer,
        responses={201: serializers.AdapterVersionSerializer},
    )
    def create(self, request: Request, **where: Any) -> Response:
        """Add a version from the hub, or, for operators, from a folder on the server. A worker
        validates it. Use the uploads for local files.
        """
        owner = self.owner
        values = self.validate_body(serializers.AdapterCreateSerializer)
        path, repository = values.pop("path"), values.pop("repository")
        model = find_model(owner, values.pop("model"))
        common = {"actor": self.actor, "tenant": owner, "served_model": model, **values}
        if bool(path) == bool(repository):
            raise InvalidRequest("Name either path or repository.", param="path")
        if path:
            version = actions.add_from_folder(path=path, **common)
        else:
            version = actions.add_from_hub(repository=repository, **common)
        return self._version(version, status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, pk: str, **where: Any) -> Response:
        """Delete an adapter. 409 while a version is live."""
        actions.delete_adapter(actor=self.actor, adapter=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(
        request=serializers.PromotionSerializer, responses=serializers.AdapterAliasSerializer
    )
    @action(detail=True, methods=["post"])
    def promote(self, request: Request, pk: str, **where: Any) -> Response:
        """Promote a version to live, or to a canary with a share of the requests."""
        adapter, values = self.row(), self.validate_body(serializers.PromotionSerializer)
        version = access.access_version(self.actor, adapter, values.pop("version"))
        return self._alias(actions.promote(actor=self.actor, version=version, **values))

    @extend_schema(
        request=serializers.AliasNameSerializer, responses=serializers.AdapterAliasSerializer
    )
    @action(detail=True, methods=["post"])
    def rollback(self, request: Request, pk: str, **where: Any) -> Response:
        """End the canary, or roll back to the previous version."""
        adapter, values = self.row(), self.validate_body(serializers.AliasNameSerializer)
        alias = access.access_alias(self.actor, adapter, values["alias"])
        return self._alias(actions.rollback(actor=self.actor, alias=alias))

    @extend_schema(request=None, responses=serializers.AdapterSerializer)
    @action(detail=True, methods=["post"])
    def offline(self, request: Request, pk: str, **where: Any) -> Response:
        """Take all names of the adapter offline; undo with a rollback."""
        actions.take_offline(actor=self.actor, adapter=self.row())
        return Response(self.get_serializer(self.row()).data)

    @extend_schema(request=None, responses=serializers.AdapterSerializer)
    @action(detail=True, methods=["post"])
    def pin(self, request: Request, pk: str, **where: Any) -> Response:
        """Pin the live versions in the memory of every replica. Operators only. 409 if more than
        half of a replica's adapter memory would be pinned.
        """
        actions.pin(actor=self.actor, adapter=self.row())
        return Response(self.get_serializer(self.row()).data)

    @extend_schema(request=None, responses=serializers.AdapterSerializer)
    @action(detail=True, methods=["post"])
    def unpin(self, request: Request, pk: str, **where: Any) -> Response:
        """Unpin the adapter on all replicas. Operators only."""
        actions.unpin(actor=self.actor, adapter=self.row())
        return Response(self.get_serializer(self.row()).data)

    @extend_schema(
        responses={204: None}, parameters=[OpenApiParameter("name", str, OpenApiParameter.PATH)]
    )
    @action(detail=True, methods=["delete"], url_path=r"aliases/(?P<name>[A-Za-z0-9._@/-]{1,100})")
    def alias(self, request: Request, pk: str, name: str, **where: Any) -> Response:
        """Delete an alias."""
        alias_row = access.access_alias(self.actor, self.row(), name)
        actions.delete_alias(actor=self.actor, alias=alias_row)
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(
        methods=["GET"],
        responses=serializers.AdapterVersionSerializer,
        parameters=[OpenApiParameter("number", int, OpenApiParameter.PATH)],
    )
    @extend_schema(
        methods=["DELETE"],
        responses={204: None},
        parameters=[OpenApiParameter("number", int, OpenApiParameter.PATH)],
    )
    @action(detail=True, methods=["get", "delete"], url_path=r"versions/(?P<number>[0-9]{1,9})")
    def version(self, request: Request, pk: str, number: str, **where: Any) -> Response:
        """One of the adapter's versions; live versions can't be deleted."""
        version_row = access.access_version(self.actor, self.row(), int(number))
        if request.method == "GET":
            return self._version(version_row)
        actions.delete_version(actor=self.actor, version=version_row)
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(
        request=None,
        responses=serializers.AdapterVersionSerializer,
        parameters=[
            OpenApiParameter("number", int, OpenApiParameter.PATH),
            OpenApiParameter(
                "operation",
                str,
                OpenApiParameter.PATH,
                enum=["check", "retire"],
                description="`check`: read its file again. `retire`: take it out of use.",
            ),
        ],
    )
    @action(
        detail=True,
        methods=["post"],
        url_path=r"versions/(?P<number>[0-9]{1,9})/(?P<operation>check|retire)",
    )
    def version_action(
        self, request: Request, pk: str, number: str, operation: str, **where: Any
    ) -> Response:
        """Revalidate a version, or retire it so that it can't be promoted."""
        version_row = access.access_version(self.actor, self.row(), int(number))
        doing = actions.revalidate_version if operation == "check" else actions.retire_version
        return self._version(doing(actor=self.actor, version=version_row))

    def _version(self, version: AdapterVersion, code: int = 200) -> Response:
        context = self.get_serializer_context()
        return Response(serializers.AdapterVersionSerializer(version, context=context).data, code)

    def _alias(self, alias: AdapterAlias) -> Response:
        return Response(serializers.AdapterAliasSerializer(alias).data)

    def get_serializer_context(self) -> dict[str, Any]:
        """Add `operator`: only operators may see paths on the server."""
        context = dict(super().get_serializer_context())
        if getattr(self, "swagger_fake_view", False):
            return context
        return {**context, "operator": self.actor.is_operator}


class AdapterUploadViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """Uploads in chunks. After a lost connection, resume at the file's `offset`."""

    queryset = AdapterUpload.objects.all()
    serializer_class = serializers.AdapterUploadSerializer
    lookup_field = "public_id"
    lookup_value_regex = r"upload-[0-9a-f]{32}"
    parser_classes = (JSONParser, RawBodyParser)

    @property
    def owner(self) -> Tenant | None:
        """Owner of the uploaded adapters; None for shared ones."""
        return self.tenant

    def get_visible_queryset(self) -> QuerySet[AdapterUpload]:
        return access.access_uploads(self.actor, self.owner)

    @extend_schema(
        request=serializers.AdapterUploadCreateSerializer,
        responses={201: serializers.AdapterUploadSerializer},
    )
    def create(self, request: Request, **where: Any) -> Response:
        """Announce the files of an adapter with their sizes in bytes."""
        owner, values = self.owner, self.validate_body(serializers.AdapterUploadCreateSerializer)
        model = find_model(owner, values.pop("model"))
        upload = actions.begin_upload(
            actor=self.actor,
            tenant=owner,
            served_model=model,
            sizes=values.pop("files"),
            **values,
        )
        return Response(self.get_serializer(upload).data, status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, **where: Any) -> Response:
        """Cancel the upload."""
        actions.cancel_upload(actor=self.actor, upload=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(
        request={"application/octet-stream": OpenApiTypes.BINARY},
        responses={200: serializers.AdapterUploadSerializer},
        parameters=[
            OpenApiParameter("file", str, OpenApiParameter.PATH),
            OpenApiParameter("Upload-Offset", int, OpenApiParameter.HEADER, required=True),
        ],
    )
    @action(detail=True, methods=["patch"], url_path=r"files/(?P<file>[^/]{1,200})")
    def piece(self, request: Request, file: str, **where: Any) -> Response:
        """Append bytes to a file. 409 with `Upload-Offset` if they don't start at its end."""
        upload = self.row()
        offset = request.META.get("HTTP_UPLOAD_OFFSET", "")
        if not (offset.isascii() and offset.isdigit() and len(offset) < 16):
            raise InvalidRequest("Upload-Offset must be a whole number.", param="Upload-Offset")
        announced = request.META.get("CONTENT_LENGTH") or "0"
        if announced.isdigit() and int(announced) > MAX_PIECE_BYTES:
            raise PayloadTooLarge(f"A piece may have at most {MAX_PIECE_BYTES} bytes.")
        actions.append_chunk(
            actor=self.actor,
            upload=upload,
            file=file,
            offset=int(offset),
            chunks=_chunks(request._request),
        )
        return Response(self.get_serializer(upload).data)

    @extend_schema(request=None, responses={201: serializers.AdapterVersionSerializer})
    @action(detail=True, methods=["post"])
    def finish(self, request: Request, **where: Any) -> Response:
        """Create a version from the complete upload; a worker validates it."""
        version = actions.finish_upload(actor=self.actor, upload=self.row())
        return Response(serializers.AdapterVersionSerializer(version).data, status.HTTP_201_CREATED)


class SharedAdapterViewSet(AdapterViewSet):
    """Adapters shared with all users of their model. For operators."""

    @property
    def owner(self) -> Tenant | None:
        return None


class SharedAdapterUploadViewSet(AdapterUploadViewSet):
    """Uploads of shared adapters. For operators."""

    @property
    def owner(self) -> Tenant | None:
        return None


class RequestStoryViewSet(TenantMixin):
    """The ledger entry of a request, by its id."""

    queryset = UsageEntry.objects.all()
    serializer_class = serializers.RequestSerializer
    lookup_field = "request_id"
    lookup_value_regex = r"[^/]{1,200}"

    def get_visible_queryset(self) -> QuerySet[UsageEntry]:
        return UsageEntry.objects.none()

    def retrieve(self, request: Request, tenant: str, request_id: str) -> Response:
        """The model, adapter and digest that answered the request, and its usage."""
        entry = access_request(self.actor, self.tenant, request_id)
        return Response(serializers.RequestSerializer(entry).data)


def _full_queryset(rows: QuerySet[Adapter]) -> QuerySet[Adapter]:
    aliases = AdapterAlias.objects.select_related("version", "canary", "previous")
    return rows.prefetch_related("versions", Prefetch("aliases", queryset=aliases))


def _chunks(request: Any) -> Iterator[bytes]:
    remaining = MAX_PIECE_BYTES
    while chunk := request.read(CHUNK):
        remaining -= len(chunk)
        if remaining < 0:
            raise PayloadTooLarge(f"A piece may have at most {MAX_PIECE_BYTES} bytes.")
        yield chunk
