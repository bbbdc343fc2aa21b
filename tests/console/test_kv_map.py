"""What viewers of the KV map see: an operator all blocks, a tenant its own alone."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import msgspec
import pytest
import redis

from engine.contract import redis_keys
from engine.contract.replica_state import KVMapBlock, KVMapFrame, frames_key, watch_key
from engine.serving.kv_map import KVMapBuilder, KVMapPublisher
from engine.system.redis_client import async_client
from kv_map import access as kv_snapshot
from kv_map import consumer as kv_consumer
from kv_map import hub as kv_hub
from kv_map.consumer import KvConsumer, View
from kv_map.state import Mirror, OperatorBlockView, TenantBlockView
from tenants import actions
from tenants.actors import SYSTEM_ACTOR
from tenants.models import Role, Tenant, User
from tenants.websockets import BAD_MESSAGES
from tests.console.beats import heartbeat
from tests.console.conftest import Beat, Login
from tests.console.seed import PASSWORD
from tests.engine.helpers import Driver

CellUsers = dict[int, tuple[Any, ...]]


class Page:
    """What a page holds after the frames that it got."""

    def __init__(self) -> None:
        self.cells: CellUsers = {}
        self.frames: list[dict[str, Any]] = []

    def apply_frame(self, frame: dict[str, Any] | None) -> None:
        if frame is None:
            return
        self.frames.append(frame)
        if frame.get("whole"):
            self.cells = {}
        for slot in frame.get("gone", ()):
            del self.cells[slot]
        for slot, refs, cached, owner, users, adapter, *_ in frame["blocks"]:
            words = frame["words"]
            names = tuple(sorted(words[user] for user in users))
            self.cells[slot] = (refs, cached, words[owner], names, words[adapter])


def test_a_tenants_page_follows_its_own_blocks_and_nothing_else() -> None:
    rng, kv_map_builder = (
        random.Random(3),
        KVMapBuilder(KVMapPublisher(redis.Redis(), "none", "r"), "r", "r-1"),
    )
    driver, mirror = Driver(num_blocks=40, token_budget=30), Mirror()
    sight, page, alive = TenantBlockView("acme"), Page(), []
    kv_map_builder.watch(b"1")
    for turn in range(100):
        tenant = rng.choice(["acme", "rival"])
        prompt = [rng.randrange(5) for _ in range(rng.randrange(4, 20))]
        if rng.random() < 0.5:
            alive.append(driver.add(prompt, tenant=tenant, namespace=tenant, max_tokens=9))
        if driver.scheduler.has_work:
            driver.step()
        if alive and rng.random() < 0.4:
            driver.scheduler.finish(alive.pop(0), "abort")
        frame = kv_map_builder.frame(driver.scheduler)
        changed = mirror.apply_frame(frame)
        assert changed is not None
        page.apply_frame(
            sight.full_frame(mirror) if turn == 0 else sight.delta(mirror, changed, frame.evicted)
        )
        owned_cells = sorted(
            (cell.refs, int(cell.cached), cell.owner, tuple(sorted(cell.users)), cell.adapter)
            for cell in mirror.cells.values()
            if cell.owner == "acme" and (cell.refs or cell.cached)
        )
        assert sorted(page.cells.values()) == owned_cells
        # Slots are dense: no gap tells of others' blocks between.
        assert all(slot < 40 for slot in page.cells)
    assert "rival" not in repr(page.frames)
    assert not any("num_free" in frame or "num_cached" in frame for frame in page.frames)


def run(prompt: list[int], warm: bool) -> list[dict[str, Any]]:
    """What Acme's page is sent while Rival sends a prompt that hits its own cache, or doesn't."""
    kv_map_builder = KVMapBuilder(KVMapPublisher(redis.Redis(), "none", "r"), "r", "r-1")
    driver, mirror, sight = (
        Driver(num_blocks=200, token_budget=50),
        Mirror(),
        TenantBlockView("acme"),
    )
    first = driver.add(prompt if warm else [99, *prompt[1:]], tenant="rival", namespace="rival")
    driver.step()
    driver.scheduler.finish(first, "stop")
    mine = driver.add(list(range(30)), tenant="acme", namespace="acme")
    driver.step()
    kv_map_builder.watch(b"1")
    mirror.apply_frame(kv_map_builder.frame(driver.scheduler))
    frames = [sight.full_frame(mirror)]
    driver.add(prompt, tenant="rival", namespace="rival", max_tokens=3)
    for _ in range(6):
        driver.step()
        frame = kv_map_builder.frame(driver.scheduler)
        changed = mirror.apply_frame(frame)
        assert changed is not None
        if (news := sight.delta(mirror, changed, frame.evicted)) is not None:
            frames.append(news)
    assert mine.num_output_tokens > 0
    return [{k: v for k, v in frame_data.items() if k != "at"} for frame_data in frames]


def test_fault_50_a_tenants_map_is_the_same_whether_anothers_guess_is_cached_or_not() -> None:
    other_prompt = list(range(40, 80))
    assert run(other_prompt, warm=True) == run(other_prompt, warm=False)


def owned_by(*owners: str, number: int = 1) -> KVMapFrame:
    """Cached blocks 0, 1, ... of these tenants; a whole frame if it's the first."""
    words = sorted({*owners, ""})
    reported_frame = frame(number, full=number == 1)
    reported_frame.words, reported_frame.num_blocks = words, len(owners)
    reported_frame.blocks = [
        KVMapBlock(block_id, 0, True, words.index(owner), [], 0)
        for block_id, owner in enumerate(owners)
    ]
    return reported_frame


def test_a_page_that_opens_is_told_of_a_large_pool_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_consumer, "SLICE", 10)
    pool, mirror, acme = ["acme", "rival", "rival"] * 15, Mirror(), "acme"
    views = {sight: (View(sight), Page()) for sight in (OperatorBlockView(), TenantBlockView(acme))}
    mirror.apply_frame(owned_by(*pool))
    for view, _ in views.values():
        view.hear(mirror, None, 0)
    for turn in range(8):
        for view, page in views.values():
            page.apply_frame(view.next_frame(mirror))
        if turn == 1:  # meanwhile another takes the first blocks and the last
            news = owned_by(*(["rival"] * 6), number=2)
            news.blocks += [KVMapBlock(44, 0, True, news.words.index("rival"), [], 0)]
            changed = mirror.apply_frame(news)
            for view, _ in views.values():
                view.hear(mirror, changed, 0)
    operator, tenant = (page for _, page in views.values())
    assert (len(operator.cells), len(tenant.cells)) == (45, 13)
    assert [cell[2] for cell in operator.cells.values()].count(acme) == 13
    assert max(len(frame["blocks"]) for page in (operator, tenant) for frame in page.frames) == 10
    assert [frame.get("whole", False) for frame in tenant.frames] == [True, False, False]
    # Nine of others lie between two of its own: its first piece is as full as if none did.
    assert len(tenant.frames[0]["blocks"]) == 10
    assert not any(view.pending_blocks or view.next_frame(mirror) for view, _ in views.values())


def frame(number: int, run: int = 1, *, full: bool = False) -> KVMapFrame:
    return KVMapFrame(
        replica_id="r",
        incarnation="r-1",
        number=number,
        run=run,
        at=0.0,
        num_blocks=4,
        block_size=16,
        num_free=4,
        num_cached=0,
        whole=full,
    )


async def test_a_question_that_was_taken_for_an_old_one_is_asked_again(
    live_redis: str, key_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count begins at 1 when nobody looked for a while. A replica that saw no pause goes on
    with the frames of its run 1.
    """
    monkeypatch.setattr(kv_hub, "PATIENCE_S", 0.2)
    client = async_client(live_redis)
    seen, number = asyncio.Event(), 1
    kv_hub.hub.join("r", listener := lambda mirror, changed, evicted: seen.set())
    try:
        async with asyncio.timeout(60):
            while not seen.is_set():
                number += 1
                asked = int(await client.get(watch_key("r", key_prefix)) or 1)
                reported_frame = frame(number) if asked == 1 else frame(1, asked, full=True)
                await client.publish(
                    frames_key("r", key_prefix), msgspec.msgpack.encode(reported_frame)
                )
                await asyncio.sleep(0.02)
    finally:
        kv_hub.hub.leave("r", listener)
        await client.aclose()


def test_a_frame_that_does_not_follow_asks_for_a_whole_one() -> None:
    mirror = Mirror()
    assert mirror.apply_frame(frame(2)) is None
    assert mirror.apply_frame(frame(1, full=True)) == set()
    assert mirror.apply_frame(frame(2)) == set()
    assert mirror.apply_frame(frame(4)) is None
    assert mirror.apply_frame(frame(2, run=2)) is None
    assert OperatorBlockView().full_frame(mirror)["num_cells"] == 4


@pytest.fixture
def people(rows: None) -> None:
    acme = Tenant.objects.get(slug="acme")
    for name, role in (("vera", Role.VIEWER), ("mia", Role.MEMBER), ("adam", Role.ADMIN)):
        user = User.objects.create_user(name, f"{name}@example.org", PASSWORD)
        actions.add_member(actor=SYSTEM_ACTOR, tenant=acme, user=user, role=role)


#: Who sees Acme's private replica, and who may prove isolation in Acme.
ROLES = {
    "root": (True, True),
    "ada": (True, True),
    "adam": (True, True),
    "mia": (True, False),
    "vera": (True, False),
    "olga": (False, False),
    "nobody": (False, False),
}


@pytest.mark.parametrize("who", ROLES)
def test_who_sees_which_replica_and_the_button(
    login: Login, people: None, beat: Beat, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_snapshot, "WAIT_S", 0.3)
    beat(heartbeat("acme-1", "acme-private", stats={"num_blocks": 64}))
    sees, proves = ROLES[who]
    client = login(who)
    page = client.get("/console/kv/").content.decode()
    assert ("acme-1" in page) == sees
    assert ('id="proof-form"' in page) == proves
    response = client.get("/api/blocks/acme-1/", {"tenant": "acme"})
    # Nobody publishes for this heartbeat: whoever may look hears that.
    assert response.status_code == (503 if sees else 404)
    if who not in ("root", "nobody"):
        assert client.get("/api/blocks/acme-1/").status_code == 404
    body = {"tenant": "acme", "model": "acme-private"}
    if not proves:
        asked = client.post("/api/isolation/", body, content_type="application/json")
        assert asked.status_code == (403 if sees else 404)


def test_strangers_are_asked_who_they_are(client: Any) -> None:
    assert client.get("/api/blocks/x/").status_code == 401
    assert client.post("/api/isolation/", {}).status_code == 401
    assert client.get("/console/kv/")["Location"].startswith("/login/")


def test_the_channel_is_the_installations_own() -> None:
    assert frames_key("r1", "mine") != frames_key("r1", redis_keys.KEY_PREFIX)


SHORT = ("[]", "{}", '{"replica": 1, "tenant": ""}', "x" * 2000)


async def test_fault_01_a_frame_in_deep_brackets_is_a_bad_message() -> None:
    page, closed = KvConsumer(), list[int]()

    async def close(code: int) -> None:
        closed.append(code)

    page.user, page.close = "somebody", close  # type: ignore[method-assign, assignment]
    gc.disable()  # what it would end at the bottom of so many calls can't end there
    try:
        for text in ("[" * KvConsumer.max_frame_chars, *SHORT):
            await page.receive(text)
    finally:
        gc.enable()
    assert closed == [BAD_MESSAGES] * 5
