"""Rendering keeps off the event loop, within its time, and tokenizers follow their files."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.contract.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest
from engine.contract.messages import ModelInfo
from engine.text.jinja_sandbox import RenderLimits, TemplateLimit
from engine.text.tokenizer import Tokenizer
from inference.errors import Overloaded
from inference.loop import offload as fair_threads
from inference.loop.offload import FairThreadPool, RenderPool
from inference.rendering import prompts as prompts_module
from inference.rendering import tokenizers as tokenizers_module
from inference.rendering.prompts import (
    chat_token_ids,
    count_chars,
    merge_late_system_messages,
    template_messages,
    text_token_ids,
)
from inference.rendering.tokenizers import CHECK_EVERY_S, TokenizerCache

INFO = ModelInfo(name="m", path="", max_model_len=100, vocab_size=512, dtype="float32")


async def chat_ids(
    tokenizer: Tokenizer, info: ModelInfo, messages: list[dict[str, Any]], **options: Any
) -> list[int]:
    chars = count_chars(messages)
    return await chat_token_ids(tokenizer, info, messages, tenant="acme", chars=chars, **options)


async def test_short_work_stays_and_long_work_leaves_the_loop() -> None:
    pool = RenderPool(1)
    thread_id = threading.get_ident()
    assert await pool.run("acme", 10, threading.get_ident) == thread_id
    assert await pool.run("acme", 10**6, threading.get_ident) != thread_id


async def test_the_loop_goes_on_while_a_long_prompt_is_rendered(tokenizer: Tokenizer) -> None:
    release = threading.Event()
    pool = RenderPool(1)
    job = asyncio.create_task(pool.run("acme", 10**6, release.wait, 10))
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert not job.done()
    release.set()
    assert await job


async def test_work_that_takes_too_long_is_given_up(settings: Any) -> None:
    settings.QUIRE = settings.QUIRE.replace(render_timeout_s=0.05)
    release = threading.Event()
    with pytest.raises(InvalidRequest) as caught:
        await RenderPool(1).run("acme", 10**6, release.wait, 10)
    release.set()
    assert caught.value.code == "render_timeout"


async def test_work_that_is_done_just_as_its_client_goes_away_goes_on_for_nobody() -> None:
    release, pool = threading.Event(), RenderPool(1)
    job = asyncio.create_task(pool.run("acme", 10**6, release.wait, 10))
    await asyncio.sleep(0.01)
    release.set()
    time.sleep(0.1)  # noqa: ASYNC251  the loop hears of no result before it cancels
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job


async def test_too_much_waiting_work_of_a_tenant_is_refused_and_anothers_isnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fair_threads, "TENANT_PER_THREAD", 3)
    pool, release = RenderPool(1), threading.Event()
    jobs = [asyncio.create_task(pool.run("acme", 10**6, release.wait, 10)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await pool.run("acme", 10**6, release.wait, 10)
    another = asyncio.create_task(pool.run("another", 10**6, release.wait, 10))
    await asyncio.sleep(0.01)
    release.set()
    assert all(await asyncio.gather(another, *jobs))
    assert await pool.run("acme", 10**6, release.wait, 10), "there is room again"


def test_fault_51_threads_go_to_whoever_had_the_least_of_them() -> None:
    threads, release, order = FairThreadPool(1, "test", "jobs"), threading.Event(), []
    started_event = threading.Event()

    def first() -> None:
        started_event.set()
        release.wait(60)

    jobs = [threads.submit("noisy", first)]
    started_event.wait(60)
    jobs += [threads.submit("noisy", lambda: order.append("noisy")) for _ in range(50)]
    jobs += [threads.submit("quiet", lambda: order.append("quiet")) for _ in range(3)]
    release.set()
    for job in jobs:
        job.result(60)
    # The job that ran has cost the noisy one more than all of the quiet one's together.
    assert order[:3] == ["quiet"] * 3


async def test_what_a_template_raises_is_the_requests_fault(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    for content in ("x", "x" * 10_000):
        with pytest.raises(InvalidRequest, match="roles must alternate"):
            await chat_ids(
                tokenizer, INFO, [{"role": "user", "content": content}], chat_template=template
            )


async def test_a_text_that_can_not_fit_is_not_tokenized(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextLengthExceeded, match="1000000 characters"):
        await text_token_ids(tokenizer, INFO, ["x" * 10**6], tenant="acme")


async def test_texts_are_tokenized_in_their_order(tokenizer: Tokenizer) -> None:
    texts = [f"text {i}" for i in range(300)]
    token_ids = await text_token_ids(tokenizer, INFO, texts, tenant="acme")
    assert token_ids == [tokenizer.encode(text) for text in texts]
    # The garbage collector would go through every token of thousands of prompts.
    assert not any(map(gc.is_tracked, token_ids))


async def test_a_tokenizer_is_loaded_once_and_again_when_its_files_change(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    cache = TokenizerCache()
    first, second = await asyncio.gather(
        cache.get("acme", str(folder)), cache.get("acme", str(folder))
    )
    assert first is second
    monkeypatch.setattr(tokenizers_module, "CHECK_EVERY_S", 0.0)
    assert await cache.get("acme", str(folder)) is first, "its files are the same"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "changed"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    changed = await cache.get("acme", str(folder))
    assert changed is not first
    assert changed.chat_template == "changed"


async def test_a_bounded_number_of_tokenizers_is_kept(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers_module, "MAX_TOKENIZERS", 2)
    cache = TokenizerCache()
    for name in ("a", "b", "c"):
        shutil.copytree(model_folder, tmp_path / name)
        await cache.get("acme", str(tmp_path / name))
    assert len(cache._entries) == 2


async def test_a_busy_models_requests_do_not_wait_until_its_folder_was_looked_at_again(
    model_folder: Path,
) -> None:
    folder, cache = str(model_folder), TokenizerCache()
    cached = await cache.get("acme", folder)
    [entry] = cache._entries.values()

    async def answers_at_once(age: float) -> bool:
        """Whether it does so long after it looked, with what was known."""
        entry.checked_at = time.monotonic() - age
        asked = asyncio.create_task(cache.get("acme", folder))
        await asyncio.sleep(0)
        at_once = asked.done()
        assert await asked is cached
        return at_once

    assert await answers_at_once(0.4 * CHECK_EVERY_S)
    assert not cache._loading
    for _ in range(2):  # one look for both
        assert await answers_at_once(0.6 * CHECK_EVERY_S)
    [loading] = cache._loading.values()
    await loading
    assert time.monotonic() - entry.checked_at < 0.5 * CHECK_EVERY_S
    assert not await answers_at_once(1.1 * CHECK_EVERY_S)
    assert not cache._loading


async def test_a_folder_that_is_not_shared_is_the_servers_fault(tmp_path: Path) -> None:
    with pytest.raises(EngineUnavailable, match="tokenizer"):
        await TokenizerCache().get("acme", str(tmp_path / "nowhere"))


def test_developers_speak_as_the_system_to_older_templates() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert template_messages(messages, "")[0]["role"] == "system"
    assert template_messages(messages, "{% if role == 'developer' %}")[0]["role"] == "developer"


FRONT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_fault_87_a_late_system_message_leaves_the_earlier_turns_as_they_were(
    tokenizer: Tokenizer,
) -> None:
    """By role: s(ystem), d(eveloper), u(ser), a(ssistant), t(ool)."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    front = tokenizer.with_chat_template(FRONT_TEMPLATE)

    def merged(chat: str) -> str:
        messages = [{"role": roles[role], "content": f"{role}{k}"} for k, role in enumerate(chat)]
        merged = merge_late_system_messages(messages, front)
        return " ".join(f"{message['role'][0]}:{message['content']!r}" for message in merged)

    assert merged("sua") == "s:'s0' u:'u1' a:'a2'"
    assert merged("ssu") == r"s:'s0\n\ns1' u:'u2'"
    assert merged("sus") == r"s:'s0' u:'u1\n\ns2'"
    assert merged("susau") == r"s:'s0' u:'u1\n\ns2' a:'a3' u:'u4'"
    assert merged("suats") == "s:'s0' u:'u1' a:'a2' t:'t3' u:'s4'"
    assert merged("suasu") == r"s:'s0' u:'u1' a:'a2' u:'s3\n\nu4'"
    assert merged("udsu") == r"u:'u0\n\nd1\n\ns2\n\nu3'"
    anywhere = tokenizer.with_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    late = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    assert merge_late_system_messages(late, anywhere) == late
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, late[1]]
    [both] = merge_late_system_messages(parts, front)
    assert both["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


NESTED = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
USER = [{"role": "user", "content": "hello"}]


async def test_a_template_without_end_stops_and_frees_its_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RenderPool(1)
    monkeypatch.setattr(prompts_module, "get_render_pool", lambda: pool)
    limits = partial(RenderLimits, steps=500_000)  # a quarter of what there is
    monkeypatch.setattr(prompts_module, "RenderLimits", limits)
    ticks = 0

    async def beat() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    heart = asyncio.create_task(beat())
    with pytest.raises(TemplateLimit):
        await chat_ids(tokenizer, INFO, USER, chat_template=NESTED)
    heart.cancel()
    assert ticks > 3
    assert await pool.run("acme", 10**6, lambda: "free") == "free"


async def test_a_slow_template_of_the_model_leaves_the_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered_in: list[int] = []
    render = prompts_module.render_chat

    def noting(*args: Any, **options: Any) -> list[int]:
        rendered_in.append(threading.get_ident())
        return render(*args, **options)

    monkeypatch.setattr(prompts_module, "render_chat", noting)
    monkeypatch.setattr(prompts_module, "INLINE_LIMITS", RenderLimits(steps=2))
    messages = [{"role": "user", "content": "hello"}] * 5
    assert await chat_ids(tokenizer, INFO, messages[:1])
    assert len(rendered_in) == 1
    assert await chat_ids(tokenizer, INFO, messages)
    assert rendered_in[1] == threading.get_ident() != rendered_in[2]


@pytest.mark.parametrize("content", ["hello", [{"type": "text", "text": "hello"}]])
async def test_content_formats(tokenizer: Tokenizer, settings: Any, content: Any) -> None:
    source = "{{ messages[0].content if messages[0].content is string else 'parts' }}"
    texts = {}
    for content_format in ("string", "openai", "auto"):
        settings.QUIRE = settings.QUIRE.replace(chat_template_content_format=content_format)
        messages = [{"role": "user", "content": content}]
        ids = await chat_ids(tokenizer, INFO, messages, chat_template=source)
        texts[content_format] = tokenizer.decode(ids)
    assert texts["string"] == "hello"
    assert texts["openai"] == "parts"
    assert texts["auto"] == "hello"
