"""The pages of adapters, by everybody who could open them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from adapters import actions
from adapters.models import Adapter, AdapterVersion
from catalog.models import ServedModel
from engine.contract.lora import ADAPTER_FILES, AdapterStatus
from metering.models import RequestEntry, UsageEntry
from tenants import actions as tenants
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant, User
from tests.adapter_files import adapter_folder
from tests.console.beats import heartbeat
from tests.console.conftest import Beat, Login
from tests.platform.adapters import added, ready

pytestmark = pytest.mark.usefixtures("adapter_store")


@pytest.fixture
def tone(login: Login) -> AdapterVersion:
    """Acme's adapter, ready; Acme has a member and a viewer."""
    acme = Tenant.objects.get(slug="acme")
    for name in ("member", "viewer"):
        user = User.objects.create_user(name)
        tenants.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=Role(name))
    return ready(SYSTEM_ACTOR, acme, ServedModel.objects.get(name="quill"))


def page(client: Any, path: str = "", status: int = 200) -> str:
    answer = client.get(f"/console/adapters/{path}")
    assert answer.status_code == status
    return answer.content.decode()


def do(client: Any, tone: AdapterVersion, what: str, status: int = 302, **data: Any) -> str:
    path = f"/console/adapters/{tone.adapter_id}/{what}/"
    answer = client.post(path, {"tenant": "acme", **data})
    assert answer.status_code == status, answer.content
    return client.get(answer["Location"]).content.decode() if status == 302 else ""


def test_an_empty_page_says_what_an_adapter_is(login: Login) -> None:
    text = page(login("ada"))
    assert "No adapter yet" in text
    assert "Upload an adapter" in text
    chooser = re.search(r'id="upload-files"[^>]*accept="([^"]*)"', text)
    assert chooser is not None
    kinds = {Path(name).suffix for name in ADAPTER_FILES} | {".gguf", ".zip"}
    assert set(chooser[1].split(",")) == kinds


def test_each_role_sees_what_it_may_do(login: Login, tone: AdapterVersion) -> None:
    where = f"{tone.adapter_id}/?tenant=acme"
    for name, promotes, uploads in (("ada", 1, 1), ("member", 0, 1), ("viewer", 0, 0)):
        client = login(name)
        listed, one = page(client, "?tenant=acme"), page(client, where)
        assert ("Upload an adapter" in listed) is bool(uploads)
        assert ("promote-share" in one) is bool(promotes)
        assert ">tone</a>" in listed
        assert tone.short_digest in one
    for path in ("?tenant=acme", where):
        assert tone.short_digest not in page(login("olga"), path, 404)
    assert ">tone</a>" not in page(login("olga"), "?tenant=rival")


def test_promote_canary_rollback_and_offline(login: Login, tone: AdapterVersion) -> None:
    ada = login("ada")
    assert "version 1 is live" in do(ada, tone, "promote", version="1", percent="100")
    second = ready(SYSTEM_ACTOR, tone.adapter.tenant, tone.adapter.served_model, seed=2)
    html = do(ada, tone, "promote", version="2", percent="10", alias="tone")
    assert "version 2 now gets 10 % of the requests" in html
    assert 'class="split-canary" x="90" width="10"' in html
    assert "version 1 answers all requests again" in do(ada, tone, "rollback", alias="tone")
    assert "tone-next: version 2" in do(ada, tone, "promote", version="2", new_alias="tone-next")
    assert "is no longer a name of this" in do(ada, tone, "alias/delete", alias="tone-next")
    assert "is offline" in do(ada, tone, "offline")
    assert "is retired" in do(ada, tone, "versions/2", operation="retire")
    assert "is deleted with all" in do(ada, tone, "delete")
    assert not Adapter.objects.filter(pk=second.adapter_id).exists()


def test_who_may_not_changes_nothing(login: Login, tone: AdapterVersion) -> None:
    actions.promote(actor=SYSTEM_ACTOR, version=tone)
    for name, status in (("member", 403), ("viewer", 403), ("olga", 404)):
        client = login(name)
        for operation in ("promote", "rollback", "offline", "delete", "alias/delete"):
            do(client, tone, operation, status, version="1")
        do(client, tone, "versions/1", status, operation="retire")
    tone.refresh_from_db()
    assert tone.state == "live"


@pytest.mark.parametrize("data", [{}, {"version": "x"}, {"version": "9" * 40}, {"version": "-1"}])
def test_a_form_that_is_wrong_is_told_so(login: Login, tone: AdapterVersion, data: Any) -> None:
    do(login("ada"), tone, "promote", 400, **data)
    do(login("ada"), tone, "promote", 400, version="1", percent="101")
    do(login("ada"), tone, "versions/1", 400, operation="burn")


def test_why_a_version_was_refused_is_shown(login: Login, tone: AdapterVersion) -> None:
    bad = added(SYSTEM_ACTOR, tone.adapter.tenant, tone.adapter.served_model, seed=3)
    report = {"ok": False, "error": {"message": "<b>lora_A</b> holds NaN.", "param": None}}
    AdapterVersion.objects.filter(pk=bad.pk).update(state="failed", report=report)
    text = page(login("ada"), f"{tone.adapter_id}/?tenant=acme")
    assert "&lt;b&gt;lora_A&lt;/b&gt; holds NaN." in text


def test_where_weights_lie_by_role(login: Login, tone: AdapterVersion, beat: Beat) -> None:
    rival = ready(SYSTEM_ACTOR, Tenant.objects.get(slug="rival"), tone.adapter.served_model, seed=7)
    states = [
        AdapterStatus(digest=tone.digest, tier="device", num_running=2),
        AdapterStatus(digest=rival.digest, name="secret", tier="host"),
    ]
    beat(heartbeat("host-of-mine", adapters=states))
    mine = login("ada").get("/console/api/adapters?tenant=acme").json()["adapters"]
    (spot,) = mine[0]["residency"][tone.digest]
    assert (spot["tier"], spot["running"], spot["replica"]) == ("device", 2, "replica 1")
    assert rival.digest not in str(mine)
    assert login("olga").get("/console/api/adapters?tenant=acme").status_code == 404
    operators = login("root").get("/console/api/adapters?tenant=acme").json()["adapters"]
    assert operators[0]["residency"][tone.digest][0]["replica"] == "host-of-mine"


def entry(name: str, version: AdapterVersion, adapter: str = "tone") -> None:
    """A request of Acme's in the ledger: 5 tokens."""
    UsageEntry.objects.create(
        request_id=name,
        tenant=Tenant.objects.get(slug="acme"),
        endpoint="chat.completions",
        model="quill",
        adapter=adapter,
        adapter_digest=version.digest,
        prompt_tokens=3,
        cached_tokens=0,
        completion_tokens=2,
        status=200,
        started_at=timezone.now(),
        duration_ms=1.0,
        stream=False,
    )


def test_what_was_used_is_the_adapters_that_was_asked_for(
    login: Login, tone: AdapterVersion
) -> None:
    """Others may have the same content."""
    same = [
        ready(SYSTEM_ACTOR, tenant, tone.adapter.served_model, name=name)
        for tenant, name in ((tone.adapter.tenant, "twin"), (None, "tone"), (None, "shared"))
    ]
    assert {version.digest for version in same} == {tone.digest}
    for number, name in enumerate(("tone", "tone", "shared", "twin", "twin", "twin", "gone")):
        entry(f"chatcmpl-{number}", tone, name)
    # What has no name any more is counted for one that has its content.
    for version, requests in zip([tone, *same], (3, 3, 0, 1), strict=True):
        text = page(login("ada"), f"{version.adapter_id}/?tenant=acme")
        assert f"{requests} request{'' if requests == 1 else 's'} and" in text, version.adapter


def test_which_weights_answered(login: Login, tone: AdapterVersion) -> None:
    entry("chatcmpl-7", tone)
    RequestEntry.objects.create(
        request_id="chatcmpl-7",
        header_id="req-7",
        answer_id="resp_7",
        tenant=tone.adapter.tenant,
        endpoint="responses",
        status=200,
        started_at=timezone.now(),
        duration_ms=1.0,
    )
    for name in ("chatcmpl-7", "resp_7", "req-7"):
        assert tone.digest in page(login("viewer"), f"?tenant=acme&request={name}")
        stranger = page(login("olga"), f"?tenant=rival&request={name}")
        assert "has no such request" in stranger
        assert tone.digest not in stranger
    assert "1 request and 5 tokens" in page(login("ada"), f"{tone.adapter_id}/?tenant=acme")


def test_operators_add_from_a_folder_and_others_dont(
    login: Login, tone: AdapterVersion, adapter_store: Any
) -> None:
    adapter_folder(adapter_store / "new", seed=9)
    form = {"tenant": "acme", "model": "quill", "name": "new", "source": str(adapter_store / "new")}
    for name, status in (("ada", 403), ("member", 403), ("olga", 404), ("root", 302)):
        answer = login(name).post("/console/adapters/fetch/", {**form, "shared": "yes"})
        assert answer.status_code == status, name
    assert Adapter.objects.get(name="new").tenant is None
