"""From a header to a caller."""

import asyncio
import statistics
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
from django.db import OperationalError
from django.utils import timezone

from common.cached_lookup import AsyncTTLCache
from tenants import actions, authentication
from tenants import api_keys as scopes
from tenants.actors import SYSTEM_ACTOR
from tenants.api_keys import new_key
from tenants.authentication import (
    AuthenticationFailed,
    PermissionDenied,
    ServiceUnavailable,
    authenticate,
    caller_for_user,
    check_still_valid,
    get_cached_caller,
    is_still_valid_cached,
)
from tenants.models import ApiKey
from tests.platform.conftest import World

pytestmark = [pytest.mark.django_db(transaction=True)]
database = pytest.mark.database


def bearer(secret: str) -> str:
    return f"Bearer {secret}"


async def refused(authorization: str | None, x_api_key: str | None = None) -> AuthenticationFailed:
    with pytest.raises(AuthenticationFailed) as caught:
        await authenticate(authorization, x_api_key)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    return caught.value


@database
async def test_a_key_becomes_a_caller_with_all_that_the_engine_needs(world: World) -> None:
    caller = await authenticate(bearer(world.secret))
    assert caller.tenant == "acme"
    assert caller.tenant_id == world.acme.pk
    assert caller.key_id == world.key.pk
    assert caller.user_id is None
    assert caller.cache_namespace == world.acme.cache_namespace
    assert caller.scopes == scopes.DEFAULT
    assert (caller.weight, caller.max_priority) == (1.0, 0)
    assert caller.cache_namespace not in repr(caller)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_scheme_is_read_in_any_case(world: World, scheme: str) -> None:
    assert (await authenticate(f"{scheme} {world.secret}")).tenant == "acme"


async def test_x_api_key_serves_where_authorization_is_absent(world: World) -> None:
    assert (await authenticate(None, world.secret)).tenant == "acme"
    assert (await authenticate("", world.secret)).tenant == "acme"
    await refused("Bearer nonsense", world.secret)


async def test_no_key_says_how_to_send_one(world: World) -> None:
    for headers in [(None, None), ("", ""), ("Bearer", None), ("Bearer  ", None)]:
        assert "Authorization: Bearer" in (await refused(*headers)).message


@pytest.mark.parametrize(
    "value",
    [
        "Bearer ' OR 1=1 --",
        "Bearer sk-quire-'; DROP TABLE tenants_apikey; --",
        "Bearer {secret}\n",
        "Bearer {secret}\r\nX-Admin: 1",
        "Bearer {secret}\0",
        "Bearer {secret}, Bearer {secret}",
        "Bearer {secret}" + " " * 40 + "x",
        "Bearer \ud800",
        "Bearer " + "a" * 1_000_000,
        "Bearer sk-quire-" + "a" * 1_000_000,
        "Basic " + "a" * 1_000_000,
        "\0\n" * 1000,
        "Basic {secret}",
        "{secret}",
    ],
)
async def test_fault_21_hostile_authorization_is_401(world: World, value: str) -> None:
    error = await refused(value.replace("{secret}", world.secret))
    assert len(error.message) < 200
    assert world.secret not in error.message
    assert await ApiKey.objects.acount() == 2


@database
async def test_fault_21_no_database_is_upset_by_hostile_authorization(world: World) -> None:
    for value in ("' OR 1=1 --", "sk-quire-'; DROP TABLE x; --", "\0", "\ud800", "\n" * 100):
        await refused(bearer(value))


async def test_fault_21_a_megabyte_takes_no_longer_than_a_wrong_key(world: World) -> None:
    async def median(value: str) -> float:
        times = []
        for number in range(30):
            authentication.clear_cache()
            start = time.process_time()  # of all threads: what others run meanwhile doesn't count
            await refused(value.replace("#", str(number)))
            times.append(time.process_time() - start)
        return statistics.median(times)

    short = await median("Bearer " + new_key("0123456789"))
    long = await median("Bearer #" + "a" * 1_000_000)
    # No bound in seconds: the same way is taken, so the two differ by noise and not by a factor.
    assert long < 5 * short


async def test_fault_21_each_refusal_compares_once_in_constant_time(world: World) -> None:
    invalid_secret = world.secret[:-1] + ("a" if world.secret[-1] != "a" else "b")
    for value in (invalid_secret, new_key("0123456789"), "garbage", "sk-quire-" + "a" * 10**6):
        authentication.clear_cache()
        with patch("tenants.authentication.hmac.compare_digest", return_value=False) as compare:
            await refused(bearer(value))
        assert compare.call_count == 1
        stored, presented = compare.call_args.args
        assert len(stored) == len(presented) == 64


@database
async def test_a_revoked_key_is_refused_at_once_in_this_process(world: World) -> None:
    await authenticate(bearer(world.secret))
    await asyncio.to_thread(actions.revoke_key, actor=SYSTEM_ACTOR, key=world.key)
    assert "revoked" in (await refused(bearer(world.secret))).message


async def test_a_key_revoked_while_it_is_looked_up_is_refused_from_then_on(world: World) -> None:
    look_up = authentication._look_up

    def slow(public_id: str, digest: str) -> object:
        key_row = look_up(public_id, digest)
        actions.revoke_key(actor=SYSTEM_ACTOR, key=world.key)
        return key_row

    with patch.object(authentication, "_look_up", slow):
        await authenticate(bearer(world.secret))
    assert "revoked" in (await refused(bearer(world.secret))).message


async def test_a_key_revoked_by_another_process_is_refused_within_the_caches_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await authenticate(bearer(world.secret))
    await ApiKey.objects.filter(pk=world.key.pk).aupdate(revoked_at=timezone.now())
    assert (await authenticate(bearer(world.secret))).tenant == "acme"  # as remembered
    later = time.monotonic() + authentication.TTL_S + 0.1
    for cache in (authentication._key_cache, authentication._guesses):
        monkeypatch.setattr(cache, "_clock", lambda: later)
    await refused(bearer(world.secret))
    assert authentication.TTL_S <= 5


async def test_who_asks_often_waits_for_no_look_up_and_a_revoked_key_is_found_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await authenticate(bearer(world.secret))
    assert is_still_valid_cached(caller) is False
    await check_still_valid(caller)
    await ApiKey.objects.filter(pk=world.key.pk).aupdate(revoked_at=timezone.now())
    later = time.monotonic() + authentication.TTL_S / 2 + 0.1
    for cache in (authentication._key_cache, authentication._guesses):
        monkeypatch.setattr(cache, "_clock", lambda: later)
    assert (await authenticate(bearer(world.secret))).tenant == "acme"  # as remembered
    assert is_still_valid_cached(caller)
    assert get_cached_caller(bearer(world.secret), None) == caller
    assert len(authentication._key_cache._flying) == 2
    await asyncio.gather(*authentication._key_cache._flying.values())
    assert get_cached_caller(bearer(world.secret), None) is None
    await refused(bearer(world.secret))
    with pytest.raises(AuthenticationFailed):
        is_still_valid_cached(caller)


@database
async def test_an_expired_key_is_refused(world: World) -> None:
    past = timezone.now() - timedelta(seconds=1)
    await ApiKey.objects.filter(pk=world.key.pk).aupdate(expires_at=past)
    assert "expired" in (await refused(bearer(world.secret))).message


@database
async def test_a_tenant_that_is_off_is_403_until_it_is_on_again(world: World) -> None:
    await asyncio.to_thread(
        actions.set_tenant_active, actor=SYSTEM_ACTOR, tenant=world.acme, active=False
    )
    with pytest.raises(PermissionDenied) as caught:
        await authenticate(bearer(world.secret))
    assert (caught.value.status, caught.value.code) == (403, "tenant_inactive")
    await asyncio.to_thread(
        actions.set_tenant_active, actor=SYSTEM_ACTOR, tenant=world.acme, active=True
    )
    assert (await authenticate(bearer(world.secret))).tenant == "acme"


async def test_fault_22_a_stream_can_ask_whether_its_key_still_holds(world: World) -> None:
    caller = await authenticate(bearer(world.secret))
    await check_still_valid(caller)
    await asyncio.to_thread(actions.revoke_key, actor=SYSTEM_ACTOR, key=world.key)
    with pytest.raises(AuthenticationFailed):
        await check_still_valid(caller)


async def test_fault_38_a_socket_can_ask_whether_its_user_still_belongs(world: World) -> None:
    caller = await caller_for_user(world.member)
    await check_still_valid(caller)
    membership = await world.acme.memberships.aget(user=world.member)
    await asyncio.to_thread(actions.remove_member, actor=SYSTEM_ACTOR, membership=membership)
    with pytest.raises(PermissionDenied):
        await check_still_valid(caller)
    other = await caller_for_user(world.owner)
    world.owner.is_active = False
    await world.owner.asave()
    authentication.clear_cache()
    with pytest.raises(AuthenticationFailed):
        await check_still_valid(other)


async def test_new_limits_reach_callers(world: World) -> None:
    assert (await authenticate(bearer(world.secret))).requests_per_minute is None
    await asyncio.to_thread(
        actions.update_tenant,
        actor=SYSTEM_ACTOR,
        tenant=world.acme,
        requests_per_minute=7,
        weight=3.0,
        kv_reserved_fraction=0.2,
        kv_max_fraction=0.6,
    )
    caller = await authenticate(bearer(world.secret))
    assert (caller.requests_per_minute, caller.weight) == (7, 3.0)
    assert (caller.kv_reserved_fraction, caller.kv_max_fraction) == (0.2, 0.6)


async def test_use_is_noted_once_a_minute(world: World) -> None:
    await authenticate(bearer(world.secret))
    first = (await ApiKey.objects.aget(pk=world.key.pk)).last_used_at
    assert first is not None
    authentication.clear_cache()
    await authenticate(bearer(world.secret))
    assert (await ApiKey.objects.aget(pk=world.key.pk)).last_used_at == first


async def test_one_look_up_serves_many_requests(world: World) -> None:
    real = authentication._look_up
    with patch("tenants.authentication._look_up", side_effect=real) as look_up:
        callers = await asyncio.gather(*[authenticate(bearer(world.secret)) for _ in range(200)])
        await authenticate(bearer(world.secret))
    assert {caller.tenant for caller in callers} == {"acme"}
    assert look_up.call_count == 1


async def test_a_flood_of_guesses_neither_grows_memory_nor_pushes_keys_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "_key_cache", AsyncTTLCache(ttl=60, size=50))
    monkeypatch.setattr(authentication, "_guesses", AsyncTTLCache(ttl=60, size=50))
    await authenticate(bearer(world.secret))
    await asyncio.gather(*[refused(bearer(f"guess {n}")) for n in range(300)])
    assert len(authentication._guesses) == 50
    assert len(authentication._key_cache) == 1
    with patch("tenants.authentication._look_up") as look_up:
        assert (await authenticate(bearer(world.secret))).tenant == "acme"
    assert not look_up.called


async def test_with_the_database_away_known_keys_go_on_and_others_get_503(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await authenticate(bearer(world.secret))
    base = time.monotonic()
    away = patch(
        "tenants.authentication.ApiKey.objects.select_related", side_effect=OperationalError
    )
    with away:
        monkeypatch.setattr(authentication._key_cache, "_clock", lambda: base + 30)
        assert (await authenticate(bearer(world.secret))).tenant == "acme"
        with pytest.raises(ServiceUnavailable) as caught:
            await authenticate(bearer(new_key("0123456789")))
        assert caught.value.status == 503
        monkeypatch.setattr(
            authentication._key_cache, "_clock", lambda: base + authentication.STALE_S + 1
        )
        with pytest.raises(ServiceUnavailable):
            await authenticate(bearer(world.secret))


async def test_scopes_are_required_by_name(world: World) -> None:
    caller = await authenticate(bearer(world.secret))
    caller.require(scopes.INFERENCE)
    with pytest.raises(PermissionDenied) as caught:
        caller.require(scopes.OPERATOR)
    assert caught.value.code == "insufficient_scope"


# -- sessions ---------------------------------------------------------------------------------


@database
async def test_a_member_acts_in_their_first_tenant_or_the_one_named(world: World) -> None:
    await asyncio.to_thread(
        actions.add_member, actor=SYSTEM_ACTOR, tenant=world.rival, user=world.member, role="member"
    )
    caller = await caller_for_user(world.member)
    assert (caller.tenant, caller.user_id, caller.key_id) == ("acme", world.member.pk, None)
    assert (await caller_for_user(world.member, "rival")).tenant == "rival"


@database
async def test_a_stranger_to_the_tenant_is_refused(world: World) -> None:
    with pytest.raises(PermissionDenied):
        await caller_for_user(world.outsider, "acme")
    with pytest.raises(PermissionDenied):
        await caller_for_user(world.owner, "nobody")


async def test_a_viewer_may_not_generate(world: World) -> None:
    assert scopes.INFERENCE not in (await caller_for_user(world.viewer)).scopes
    assert scopes.INFERENCE in (await caller_for_user(world.member)).scopes


async def test_an_operator_acts_anywhere(world: World) -> None:
    assert (await caller_for_user(world.operator)).tenant == "acme"
    caller = await caller_for_user(world.operator, "rival")
    assert (caller.tenant, caller.scopes) == ("rival", scopes.ALL)


async def test_nobody_and_disabled_users_are_401(world: World) -> None:
    from django.contrib.auth.models import AnonymousUser

    with pytest.raises(AuthenticationFailed):
        await caller_for_user(AnonymousUser())  # type: ignore[arg-type]
    world.owner.is_active = False
    await world.owner.asave()
    with pytest.raises(AuthenticationFailed):
        await caller_for_user(world.owner)


async def test_a_tenant_that_is_off_serves_no_session(world: World) -> None:
    await asyncio.to_thread(
        actions.set_tenant_active, actor=SYSTEM_ACTOR, tenant=world.acme, active=False
    )
    with pytest.raises(PermissionDenied):
        await caller_for_user(world.member)
