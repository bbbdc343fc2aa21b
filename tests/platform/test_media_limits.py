"""Limits on media: counted before any is read, charged when their size and time are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import RateLimited
from metering.media import admit_media, charge_media
from tenants.caller import Caller, MediaLimits
from tests.platform.callers import CALLER

pytestmark = pytest.mark.usefixtures("redis_server")

PARAM = "messages[0].content[0]"


async def admit(caller: Caller, count: int = 1, num_bytes: int = 0) -> None:
    await admit_media(caller, count=count, num_bytes=num_bytes, param=PARAM)


async def test_a_tenant_and_its_key_may_send_as_many_as_their_limits() -> None:
    tenant = replace(CALLER, media_limits=MediaLimits(media=3))
    key = replace(tenant, key_media_limits=MediaLimits(media=2))
    await admit(key, 2)
    with pytest.raises(RateLimited, match="this key reached: 2 media a minute") as refused:
        await admit(key, 2)
    assert refused.value.param == PARAM
    assert 0 < refused.value.retry_after <= 60
    await admit(replace(tenant, key_id=3))
    with pytest.raises(RateLimited, match="this tenant reached: 3 media a minute"):
        await admit(replace(tenant, key_id=3), 3)
    await admit(replace(CALLER, tenant_id=9, media_limits=MediaLimits(media=3)), 3)


async def test_more_than_a_limit_is_refused_with_both_numbers_and_takes_nothing() -> None:
    who = replace(CALLER, media_limits=MediaLimits(media=5, media_bytes=1000))
    with pytest.raises(RateLimited, match=r"1001 bytes of media.* is 1000 a minute"):
        await admit(who, num_bytes=1001)
    await admit(who, 5, 1000)


async def test_what_a_medium_turned_out_to_take_is_waited_for() -> None:
    who = replace(CALLER, media_limits=MediaLimits(media_bytes=600, media_seconds=60))
    await admit(who, num_bytes=0)
    await charge_media(who, num_bytes=600 * 61)
    with pytest.raises(RateLimited, match="600 bytes of media a minute") as refused:
        await admit(who, num_bytes=1)
    assert 3000 < refused.value.retry_after <= 3601
    slow = replace(who, tenant_id=9)
    await charge_media(slow, seconds=60 * 61)
    with pytest.raises(RateLimited, match="60 seconds of decoding a minute") as refused:
        await admit(slow)
    assert 3000 < refused.value.retry_after <= 3600


async def test_a_raised_limit_holds_at_once() -> None:
    who = replace(CALLER, media_limits=MediaLimits(media=1))
    await admit(who)
    with pytest.raises(RateLimited):
        await admit(who)
    await admit(replace(who, media_limits=MediaLimits(media=3)), 2)
