"""The management API's viewsets. Reads go through `access_*`, writes through the actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.urls import reverse
from django_filters import rest_framework as filters
from drf_spectacular.utils import extend_schema
from rest_framework import mixins, status
from rest_framework.authentication import SessionAuthentication
from rest_framework.decorators import action
from rest_framework.filters import BaseFilterBackend
from rest_framework.pagination import BasePagination
from rest_framework.permissions import BasePermission, IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.viewsets import GenericViewSet

from accounts.invitation_mail import mail_invitation
from common.errors import NotFound
from engine.contract.errors import InvalidRequest
from management_api import serializers
from management_api.base import (
    KeyFilter,
    ManagementKeyAuthentication,
    ManagementPagination,
    ManagementThrottle,
    RequiresRecentLogin,
    get_actor,
)
from tenants import access, actions
from tenants.actors import Actor, require_operator
from tenants.models import AuditEntry, Tenant, User
from tenants.serializers import ApiKeyCreateSerializer


class ManagementViewSet(GenericViewSet):
    """Base class of the viewsets: authentication, throttling, row lookup."""

    authentication_classes = (ManagementKeyAuthentication, SessionAuthentication)
    permission_classes: Sequence[type[BasePermission]] = (IsAuthenticated, RequiresRecentLogin)
    throttle_classes = (ManagementThrottle,)
    throttle_scope = "management"
    pagination_class: type[BasePagination] | None = ManagementPagination
    filter_backends: Sequence[type[BaseFilterBackend]] = (filters.DjangoFilterBackend,)
    lookup_value_regex = r"[0-9]{1,18}"
    #: Only for the OpenAPI document; rows come from `get_visible_queryset`.
    queryset: Any = None

    @property
    def actor(self) -> Actor:
        """The actor of the request."""
        return get_actor(self.request)

    def get_queryset(self) -> QuerySet[Any]:
        """Rows that the actor may see. Raises `NotFound` for a tenant they have no access to."""
        if getattr(self, "swagger_fake_view", False):
            return self.queryset.model.objects.none()
        return self.get_visible_queryset()

    def get_visible_queryset(self) -> QuerySet[Any]:
        """Rows that the actor may see; defined by each viewset."""
        raise NotImplementedError

    def validate_body(self, shape: type[Serializer]) -> dict[str, Any]:
        """Return the validated body."""
        return self.validated(shape(data=self.request.data))

    def validated(self, serializer: Serializer) -> dict[str, Any]:
        """Return a serializer's validated data. Raises `InvalidRequest` for an unknown field,
        because a misspelt limit must not be ignored.
        """
        data: Any = self.request.data
        for name in sorted(set(data) - set(serializer.fields)) if isinstance(data, Mapping) else ():
            raise InvalidRequest(f"Unknown field {name[:80]!r}.", param=name[:80])
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)

    def row(self) -> Any:
        """Return the requested row if the actor may see it. Raises `NotFound`."""
        rows = self.get_queryset().filter(**{self.lookup_field: self.kwargs[self.lookup_field]})
        row = rows.first()
        if row is None:
            raise NotFound("Not found.")
        return row

    def get_object(self) -> Any:
        """Return `row()`; this is DRF's name for it."""
        return self.row()


class TenantMixin(ManagementViewSet):
    """Base class of the viewsets below `/api/tenants/<tenant>/`."""

    @property
    def tenant(self) -> Tenant:
        """The tenant in the path. Raises `NotFound` if the actor has no access to it."""
        return access.access_tenant(self.actor, self.kwargs["tenant"])


class UserViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """Users. For operators."""

    queryset = User.objects.all()
    serializer_class = serializers.UserSerializer
    filterset_fields = ("username", "email", "is_active", "is_staff", "is_superuser")

    def get_visible_queryset(self) -> QuerySet[User]:
        return access.access_users(self.actor)

    @extend_schema(
        request=serializers.UserCreateSerializer, responses={201: serializers.UserSerializer}
    )
    def create(self, request: Request) -> Response:
        """Create a user."""
        user = actions.create_user(
            actor=self.actor, **self.validate_body(serializers.UserCreateSerializer)
        )
        return Response(serializers.UserSerializer(user).data, status.HTTP_201_CREATED)

    @extend_schema(
        request=serializers.UserSerializer(partial=True), responses=serializers.UserSerializer
    )
    def partial_update(self, request: Request, pk: str) -> Response:
        """Update a user. Deactivating ends sessions and sockets and revokes keys."""
        serializer = serializers.UserSerializer(self.row(), data=request.data, partial=True)
        values = self.validated(serializer)
        saved = actions.update_user(actor=self.actor, user=self.row(), **values)
        return Response(serializers.UserSerializer(saved).data)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, pk: str) -> Response:
        """Delete a user. Ends the user's sessions and sockets and revokes their keys."""
        actions.delete_user(actor=self.actor, user=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=serializers.PasswordSerializer, responses={204: None})
    @action(detail=True, methods=["post"])
    def password(self, request: Request, pk: str) -> Response:
        """Set or remove a user's password. Ends the user's sessions."""
        values = self.validate_body(serializers.PasswordSerializer)
        actions.set_password(actor=self.actor, user=self.row(), **values)
        return Response(status=status.HTTP_204_NO_CONTENT)


class MemberViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """Members of a tenant. Admins change members up to their own role."""

    queryset = access.Membership.objects.all()
    serializer_class = serializers.MemberSerializer
    filterset_fields = ("role", "user__is_active")

    def get_visible_queryset(self) -> QuerySet[Any]:
        return access.access_members(self.actor, self.tenant)

    @extend_schema(
        request=serializers.MemberCreateSerializer, responses={201: serializers.MemberSerializer}
    )
    def create(self, request: Request, tenant: str) -> Response:
        """Add a user who has an account. For operators; others send invitations."""
        where = self.tenant
        require_operator(self.actor)
        values = self.validate_body(serializers.MemberCreateSerializer)
        user = User.objects.filter(username=values["username"]).first()
        if user is None:
            raise NotFound(f"User {values['username']!r} not found.", param="username")
        membership = actions.add_member(
            actor=self.actor, tenant=where, user=user, role=values["role"]
        )
        return Response(serializers.MemberSerializer(membership).data, status.HTTP_201_CREATED)

    @extend_schema(request=serializers.RoleSerializer, responses=serializers.MemberSerializer)
    def partial_update(self, request: Request, tenant: str, pk: str) -> Response:
        """Change a member's role. A lower role ends sessions and sockets and revokes keys."""
        values = self.validate_body(serializers.RoleSerializer)
        saved = actions.change_role(actor=self.actor, membership=self.row(), **values)
        return Response(serializers.MemberSerializer(saved).data)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, tenant: str, pk: str) -> Response:
        """Remove a member. Ends the user's sessions and revokes their keys in this tenant."""
        actions.remove_member(actor=self.actor, membership=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)


class InvitationViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """Invitations to the tenant. For admins."""

    queryset = access.Invitation.objects.all()
    serializer_class = serializers.InvitationSerializer
    filterset_fields = ("email", "role")

    def get_visible_queryset(self) -> QuerySet[Any]:
        return access.access_invitations(self.actor, self.tenant)

    @extend_schema(
        request=serializers.InvitationSerializer,
        responses={201: serializers.InvitationWithLinkSerializer},
    )
    def create(self, request: Request, tenant: str) -> Response:
        """Create an invitation link; it is mailed if a mail server is configured."""
        where = self.tenant
        values = self.validate_body(serializers.InvitationSerializer)
        created = actions.invite(actor=self.actor, tenant=where, **values)
        link = request.build_absolute_uri(reverse("invitation", args=[created.token]))
        mailed = mail_invitation(created.invitation, link)
        fields = serializers.InvitationSerializer(created.invitation).data
        return Response({**fields, "link": link, "mailed": mailed}, status.HTTP_201_CREATED)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, tenant: str, pk: str) -> Response:
        """Revoke an invitation."""
        actions.revoke_invitation(actor=self.actor, invitation=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)


class ServiceAccountViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """A tenant's service accounts. Admins change them."""

    queryset = access.ServiceAccount.objects.all()
    serializer_class = serializers.ServiceAccountSerializer
    filterset_fields = ("name", "role", "active")

    def get_visible_queryset(self) -> QuerySet[Any]:
        return access.access_service_accounts(self.actor, self.tenant)

    @extend_schema(
        request=serializers.ServiceAccountCreateSerializer,
        responses={201: serializers.ServiceAccountSerializer},
    )
    def create(self, request: Request, tenant: str) -> Response:
        """Create a service account, which can hold keys."""
        where = self.tenant
        values = self.validate_body(serializers.ServiceAccountCreateSerializer)
        new_account = actions.create_service_account(actor=self.actor, tenant=where, **values)
        return Response(
            serializers.ServiceAccountSerializer(new_account).data, status.HTTP_201_CREATED
        )

    @extend_schema(
        request=serializers.ServiceAccountUpdateSerializer,
        responses=serializers.ServiceAccountSerializer,
    )
    def partial_update(self, request: Request, tenant: str, pk: str) -> Response:
        """Change the given fields. While a service account is inactive, its keys are refused."""
        values = self.validate_body(serializers.ServiceAccountUpdateSerializer)
        saved = actions.update_service_account(actor=self.actor, account=self.row(), **values)
        return Response(serializers.ServiceAccountSerializer(saved).data)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, tenant: str, pk: str) -> Response:
        """Deactivate a service account and revoke its keys permanently."""
        actions.retire_service_account(actor=self.actor, account=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)


class ApiKeyViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """API keys. Admins see all, members their own."""

    queryset = access.ApiKey.objects.all()
    serializer_class = serializers.ApiKeySerializer
    filterset_class = KeyFilter

    def get_visible_queryset(self) -> QuerySet[Any]:
        return access.access_keys(self.actor, self.tenant)

    @extend_schema(
        request=ApiKeyCreateSerializer,
        responses={201: serializers.ApiKeyWithSecretSerializer},
    )
    def create(self, request: Request, tenant: str) -> Response:
        """Create a key. Only this response contains its secret."""
        where = self.tenant
        values = self.validate_body(ApiKeyCreateSerializer)
        account = values.pop("service_account")
        if account is not None:
            account = access.access_service_account(self.actor, where, account)
        created = actions.create_key(
            actor=self.actor, tenant=where, service_account=account, **values
        )
        return self._created_response(created)

    @extend_schema(responses={204: None})
    def destroy(self, request: Request, tenant: str, pk: str) -> Response:
        """Revoke a key."""
        actions.revoke_key(actor=self.actor, key=self.row())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(
        request=serializers.ApiKeyRotationSerializer,
        responses={201: serializers.ApiKeyWithSecretSerializer},
    )
    @action(detail=True, methods=["post"])
    def rotate(self, request: Request, tenant: str, pk: str) -> Response:
        """Replace a key; the old one stays valid during the overlap."""
        hours = self.validate_body(serializers.ApiKeyRotationSerializer)["overlap_hours"]
        overlap = timedelta(hours=hours)
        return self._created_response(
            actions.rotate_key(actor=self.actor, key=self.row(), overlap=overlap)
        )

    def _created_response(self, created: actions.NewKey) -> Response:
        fields = serializers.ApiKeySerializer(created.key).data
        return Response({**fields, "secret": created.secret}, status.HTTP_201_CREATED)


class AuditFilter(filters.FilterSet):
    """Filters audit entries by time, action, actor and target."""

    after = filters.IsoDateTimeFilter(field_name="at", lookup_expr="gte")
    before = filters.IsoDateTimeFilter(field_name="at", lookup_expr="lt")
    actor = filters.CharFilter(field_name="actor_label", lookup_expr="icontains")

    class Meta:
        model = AuditEntry
        fields = ("action", "actor_kind", "target_type", "target_id", "address")


class AuditEntryViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, TenantMixin):
    """A tenant's audit log, newest first. For admins."""

    queryset = AuditEntry.objects.all()
    serializer_class = serializers.AuditEntrySerializer
    filterset_class = AuditFilter

    def get_visible_queryset(self) -> QuerySet[AuditEntry]:
        return access.access_audit(self.actor, self.tenant)


class InstallationAuditViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, ManagementViewSet):
    """The whole installation's audit log, newest first. For operators."""

    queryset = AuditEntry.objects.all()
    serializer_class = serializers.AuditEntrySerializer
    filterset_class = AuditFilter

    def get_visible_queryset(self) -> QuerySet[AuditEntry]:
        return access.access_all_audit(self.actor)
