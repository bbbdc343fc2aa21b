"""Every topic of the console's socket: the one place that registers them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tenants.access import access_tenant
from tenants.actors import as_actor, require_operator
from tenants.errors import NotFound
from tenants.live import ALL
from tenants.models import User


class Audience(Enum):
    """Who may have a topic."""

    #: A tenant's members have their tenant's; operators also all tenants'.
    TENANT = "tenant"
    #: The same for everybody who is logged in: nothing of a tenant may be in it.
    EVERYBODY = "everybody"
    OPERATORS = "operators"


@dataclass(frozen=True)
class Topic:
    """One kind of news.

    Attributes:
        read: dotted name of a function from a tenant's id (`ALL`: of all) to what is so now, as
            plain JSON; asked every `every_s` seconds, in a thread, while somebody has the topic,
            and sent when it changed. "": only what `tenants.live.publish` tells.
    """

    name: str
    audience: Audience
    read: str = ""
    every_s: float = 2.0


TOPICS = {
    topic.name: topic
    for topic in (
        # A new piece of history was written.
        Topic("history", Audience.EVERYBODY),
        Topic("now", Audience.TENANT, "console.overview.now.now"),
        # When the newest request that has ended began.
        Topic("requests", Audience.TENANT, "console.requests.newest"),
    )
}


def access_topic(user: User, name: str, tenant: str | None) -> tuple[Topic, int]:
    """The topic, and the id of the tenant it's for. Raises `NotFound`, `PermissionDenied`."""
    topic = TOPICS.get(name)
    if topic is None:
        raise NotFound(f"Topic {name[:50]!r} not found.", param="topic")
    if topic.audience is Audience.EVERYBODY:
        return topic, ALL
    if topic.audience is Audience.OPERATORS or tenant is None:
        require_operator(as_actor(user))
        return topic, ALL
    return topic, access_tenant(user, tenant).pk
