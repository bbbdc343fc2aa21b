"""Reading what became of requests."""

from __future__ import annotations

from django.db.models import Q, QuerySet

from engine.contract.errors import InvalidRequest
from metering.models import RequestContent, RequestEntry
from tenants.access import access_role, access_tenants
from tenants.actors import Actor, as_actor
from tenants.errors import NotFound
from tenants.models import Role, Tenant, User

Reader = Actor | User
#: How the ids of refused requests begin.
REFUSED = "refused-"
#: Classes of statuses, as people write them.
_CLASSES = {"2xx": (200, 300), "4xx": (400, 500), "5xx": (500, 600)}


def access_requests(user: Reader, tenant: Tenant | None = None) -> QuerySet[RequestEntry]:
    """Of one tenant, for its members; without one of all that the user belongs to, and of all
    tenants for an operator. Newest first. Raises `NotFound` for a stranger.
    """
    rows = RequestEntry.objects.select_related("tenant", "api_key", "user")
    if tenant is not None:
        access_role(user, tenant)
        return rows.filter(tenant=tenant)
    if as_actor(user).is_operator:
        return rows
    return rows.filter(tenant__in=access_tenants(user))


def of_status(rows: QuerySet[RequestEntry], status: str) -> QuerySet[RequestEntry]:
    """Those with a status: a number, "2xx", "4xx", "5xx" or "refused". Raises `InvalidRequest`."""
    if status == "refused":
        return rows.filter(request_id__startswith=REFUSED)
    if status in _CLASSES:
        first, last = _CLASSES[status]
        return rows.filter(status__gte=first, status__lt=last)
    if not status.isascii() or not status.isdigit() or len(status) > 3:
        raise InvalidRequest(
            f"status must be a number, 2xx, 4xx, 5xx or refused; got {status[:20]!r}.",
            param="status",
        )
    return rows.filter(status=int(status))


def access_request_entry(user: Reader, name: str) -> RequestEntry:
    """The newest request that goes by this id and is the user's to see. Raises `NotFound`."""
    found = access_requests(user).filter(called(name)).first()
    if found is None:
        raise NotFound("Request not found.", param="id")
    return found


def access_content(user: Reader, entry: RequestEntry) -> RequestContent | None:
    """What was asked and answered, if it was kept: for admins, owners and whoever asked."""
    role, own = access_role(user, entry.tenant), as_actor(user).user
    asked = own is not None and entry.user_id == own.pk
    if role.rank < Role.ADMIN.rank and not asked:
        return None
    return RequestContent.objects.filter(
        request_id=entry.request_id, tenant_id=entry.tenant_id
    ).first()


def called(name: str) -> Q:
    """Whatever a client has seen; of an attempt's or a prompt's id in the engine the request's."""
    name = name.strip()[:200]
    plain = name.partition("~")[0]
    return Q(request_id=plain) | Q(header_id=name) | Q(answer_id=plain)
