"""Conversations of the playground: one person's own, kept while tenant and retention allow it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from common.errors import Conflict, NotFound, PermissionDenied, StorageFull
from engine.contract.errors import InvalidRequest
from storage import actions, ownership
from storage.access import access_conversation, access_conversations, access_own_conversation
from storage.models import SavedConversation
from tenants import actions as tenant_actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import AuditEntry, User
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def talk(question: str, answer: str = "Well.") -> dict[str, Any]:
    """A document with one question and its answer."""
    return {
        "turns": [
            {"id": "1", "parent": None, "role": "user", "text": question},
            {"id": "2", "parent": "1", "role": "assistant", "text": answer, "model": "quill"},
        ],
        "leaf": "2",
        "model": "quill",
    }


def test_a_conversation_from_its_making_to_its_end(world: World) -> None:
    conversation = actions.create_conversation(
        actor=world.member, tenant=world.acme, document=talk("What is this NUL\0 and \u202e?")
    )
    assert conversation.title == "What is this NUL and \u202e?"
    assert access_own_conversation(world.member, conversation.public_id).document["leaf"] == "2"
    longer = talk("Two?", "Yes. " * 50)
    of = {"actor": world.member, "public_id": conversation.public_id}
    assert actions.update_conversation(**of, document=longer, version=1).version == 2
    with pytest.raises(Conflict):  # another tab, which has the first version
        actions.update_conversation(**of, document=longer, version=1)
    renamed = actions.rename_conversation(**of, title="  A\nname\0 ")
    assert renamed.title == "A name"
    for title in ("", " \n ", "x" * 201):
        with pytest.raises(InvalidRequest):
            actions.rename_conversation(**of, title=title)
    actions.delete_conversation(**of)
    with pytest.raises(NotFound):
        access_own_conversation(world.member, conversation.public_id)
    verbs = AuditEntry.objects.filter(target_type="savedconversation").values_list("action")
    assert sorted(verb for (verb,) in verbs) == ["conversation.create", "conversation.delete"]
    assert not AuditEntry.objects.filter(target_label__contains="this NUL").exists()


def test_a_search_finds_ones_own_by_all_words_newest_first(world: World) -> None:
    for question in ("Über Lissabon", "Lisbon and Porto", "Nothing"):
        actions.create_conversation(
            actor=world.member, tenant=world.acme, document=talk(question, "A fox % _ ran.")
        )

    def find_titles(search: str, user: User = world.member, cursor: str = "") -> list[str]:
        return [row.title for row in access_conversations(user, world.acme, search, cursor)]

    assert find_titles("") == ["Nothing", "Lisbon and Porto", "Über Lissabon"]
    assert find_titles("ÜBER fox") == ["Über Lissabon"]
    assert find_titles("lisbon porto") == ["Lisbon and Porto"]
    assert find_titles("100%") == []
    assert find_titles("%") == find_titles("")
    assert find_titles("", world.owner) == []  # a colleague's are no business of hers
    first = access_conversations(world.member, world.acme)[0]
    assert find_titles("", cursor=first.public_id) == ["Lisbon and Porto", "Über Lissabon"]


def test_fault_38_a_link_opens_for_the_tenants_people_alone(world: World) -> None:
    conversation = actions.create_conversation(
        actor=world.member, tenant=world.acme, document=talk("Ours")
    )
    of = {"actor": world.member, "public_id": conversation.public_id}
    with pytest.raises(NotFound):  # not shared yet
        access_conversation(world.owner, conversation.public_id)
    actions.share_conversation(**of, shared=True)
    assert access_conversation(world.owner, conversation.public_id).document["leaf"] == "2"
    for operation in (
        lambda who: access_conversation(who, conversation.public_id),
        lambda who: access_own_conversation(who, conversation.public_id),
    ):
        with pytest.raises(NotFound):
            operation(world.outsider)
    for who in (world.owner, world.outsider):  # to read isn't to write
        with pytest.raises(NotFound):
            actions.rename_conversation(actor=who, public_id=conversation.public_id, title="Mine")
        with pytest.raises(NotFound):
            actions.delete_conversation(actor=who, public_id=conversation.public_id)
    with pytest.raises(NotFound):
        actions.create_conversation(actor=world.outsider, tenant=world.acme, document=talk("x"))
    actions.share_conversation(**of, shared=False)
    with pytest.raises(NotFound):
        access_conversation(world.owner, conversation.public_id)


def test_a_tenant_switches_it_off_and_its_days_count(world: World) -> None:
    conversation = actions.create_conversation(
        actor=world.member, tenant=world.acme, document=talk("x")
    )
    with pytest.raises(PermissionDenied):
        tenant_actions.update_tenant(
            actor=world.member, tenant=world.acme, keep_conversations=False
        )
    tenant_actions.update_tenant(actor=SYSTEM_ACTOR, tenant=world.acme, keep_conversations=False)
    world.acme.refresh_from_db()
    with pytest.raises(PermissionDenied) as caught:
        actions.create_conversation(actor=world.member, tenant=world.acme, document=talk("y"))
    assert caught.value.code == "conversations_off"
    with pytest.raises(PermissionDenied):
        actions.update_conversation(
            actor=world.member, public_id=conversation.public_id, document=talk("y"), version=1
        )
    tenant_actions.update_tenant(actor=SYSTEM_ACTOR, tenant=world.acme, keep_content_days=7)
    actions.remove_expired()
    assert SavedConversation.objects.exists()
    old = timezone.now() - timedelta(days=8)
    SavedConversation.objects.update(changed_at=old)
    actions.remove_expired()
    assert not SavedConversation.objects.exists()


def test_one_past_its_end_is_gone_before_a_worker_removes_it(world: World) -> None:
    conversation = actions.create_conversation(
        actor=world.member, tenant=world.acme, document=talk("x")
    )
    assert conversation.expires_at is not None
    SavedConversation.objects.update(expires_at=timezone.now())
    with pytest.raises(NotFound):
        access_own_conversation(world.member, conversation.public_id)
    assert access_conversations(world.member, world.acme) == []


def test_a_conversation_goes_with_its_person(world: World) -> None:
    actions.create_conversation(actor=world.member, tenant=world.acme, document=talk("x"))
    tenant_actions.delete_user(actor=SYSTEM_ACTOR, user=world.member)
    assert not SavedConversation.objects.exists()


def test_what_a_tenant_keeps_is_bounded(world: World, settings: Any) -> None:
    ownership.forget()
    settings.QUIRE = settings.QUIRE.replace(tenant_quotas={"stored_chars": 500})
    of = {"actor": world.member, "tenant": world.acme, "document": talk("x", "y" * 100)}
    for _ in range(2):
        actions.create_conversation(**of)
    with pytest.raises(StorageFull):
        actions.create_conversation(**of)
    assert SavedConversation.objects.count() == 2


TURN = {"id": "1", "parent": None, "role": "user", "text": "x"}


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"turns": "x"},
        {"turns": [{**TURN, "text": 3}]},
        {"turns": [{**TURN, "role": "system"}]},
        {"turns": [{**TURN, "html": "<b>"}]},
        {"turns": [{**TURN, "parent": "2"}]},
        {"turns": [TURN, TURN]},
        {"turns": [TURN], "leaf": "7"},
        {"turns": [{**TURN, "id": str(n)} for n in range(1001)]},
        {"turns": [{**TURN, "text": "x" * 1_000_001}]},
    ],
    ids=lambda document: str(document)[:60],
)
def test_what_is_no_conversation_is_refused(world: World, document: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        actions.create_conversation(actor=world.member, tenant=world.acme, document=document)
    assert caught.value.param == "document"
    assert not SavedConversation.objects.exists()


def test_at_most_four_models_answer_a_question(world: World) -> None:
    document = talk("Compare")
    other = {"text": "An otter says so.", "model": "quill"}
    document["turns"][1]["beside"] = [other] * 3
    document["compared"] = ["quill"] * 3
    row = actions.create_conversation(actor=world.member, tenant=world.acme, document=document)
    assert len(row.document["turns"][1]["beside"]) == 3
    assert access_conversations(world.member, world.acme, "otter")
    document["turns"][1]["beside"] = [other] * 4
    with pytest.raises(InvalidRequest):
        actions.create_conversation(actor=world.member, tenant=world.acme, document=document)
