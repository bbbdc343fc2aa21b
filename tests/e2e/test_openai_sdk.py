"""The `openai` SDK, unmodified, against the running product."""

from __future__ import annotations

import math

import openai
import pytest

from tests.e2e.product import Product

ASK = [{"role": "user", "content": "What is the capital of France?"}]


def test_models_are_listed_and_found(client: openai.OpenAI, product: Product) -> None:
    assert product.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(product.model).id == product.model


def test_chat_answers_right(client: openai.OpenAI, product: Product) -> None:
    answer = client.chat.completions.create(model=product.model, messages=ASK, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_is_the_whole_one_in_pieces(
    client: openai.OpenAI, product: Product
) -> None:
    full_completion = client.chat.completions.create(
        model=product.model, messages=ASK, temperature=0
    )
    chunks, usage, finish, roles = [], None, None, []
    for chunk in client.chat.completions.create(
        model=product.model,
        messages=ASK,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            chunks.append(choice.delta.content or "")
            roles += [choice.delta.role] if choice.delta.role else []
            finish = choice.finish_reason or finish
    assert "".join(chunks) == full_completion.choices[0].message.content
    assert roles == ["assistant"]
    assert finish == "stop"
    assert usage is not None
    assert full_completion.usage is not None
    assert usage.completion_tokens == full_completion.usage.completion_tokens


async def test_the_async_client_streams_several_at_once(product: Product) -> None:
    import asyncio

    async with openai.AsyncOpenAI(
        base_url=product.base_url, api_key=product.api_key, max_retries=0, timeout=60
    ) as client:

        async def ask(question: str) -> str:
            stream = await client.chat.completions.create(
                model=product.model,
                messages=[{"role": "user", "content": question}],
                temperature=0,
                stream=True,
            )
            return "".join(
                [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            )

        questions = [
            "Hello!",
            "What is 2 + 3?",
            "What is the capital of Italy?",
            "Tell me a story.",
        ]
        together = await asyncio.gather(*(ask(question) for question in questions))
        isolated_responses = [await ask(question) for question in questions]
    assert together == isolated_responses
    assert "Rome" in together[2]


def test_two_outputs_of_one_prompt_differ(client: openai.OpenAI, product: Product) -> None:
    answer = client.chat.completions.create(
        model=product.model,
        messages=[{"role": "user", "content": "Tell me a story."}],
        n=2,
        seed=7,
        temperature=1.0,
        max_tokens=60,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_a_seed_repeats_its_answer(client: openai.OpenAI, product: Product) -> None:
    def ask() -> str | None:
        answer = client.chat.completions.create(
            model=product.model,
            messages=[{"role": "user", "content": "Tell me a story."}],
            seed=11,
            temperature=1.0,
            max_tokens=40,
        )
        return answer.choices[0].message.content

    assert ask() == ask()


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, product: Product) -> None:
    baseline_completion = client.chat.completions.create(
        model=product.model, messages=ASK, temperature=0
    )
    text = baseline_completion.choices[0].message.content or ""
    stop = text[4:9]
    cut = client.chat.completions.create(
        model=product.model, messages=ASK, temperature=0, stop=[stop]
    )
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_logprobs_come_with_the_best_alternatives(client: openai.OpenAI, product: Product) -> None:
    answer = client.chat.completions.create(
        model=product.model, messages=ASK, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob <= 0
        assert math.isclose(entry.logprob, entry.top_logprobs[0].logprob, abs_tol=1e-6)


def test_completions_take_text_lists_and_token_ids(client: openai.OpenAI, product: Product) -> None:
    text = client.completions.create(
        model=product.model, prompt="The capital of France is", max_tokens=4, temperature=0
    )
    several = client.completions.create(
        model=product.model,
        prompt=["The capital of France is", "The capital of Italy is"],
        max_tokens=4,
        temperature=0,
    )
    assert several.choices[0].text == text.choices[0].text
    assert [choice.index for choice in several.choices] == [0, 1]
    ids = client.completions.create(
        model=product.model, prompt=[10, 11, 12], max_tokens=4, temperature=0
    )
    lists = client.completions.create(
        model=product.model, prompt=[[10, 11, 12], [13, 14]], max_tokens=4, temperature=0
    )
    assert lists.choices[0].text == ids.choices[0].text
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_a_repeated_prompt_is_served_from_the_cache(
    client: openai.OpenAI, product: Product
) -> None:
    prompt = list(range(30, 130))
    for expected in (0, 96):
        answer = client.completions.create(
            model=product.model, prompt=prompt, max_tokens=2, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected


def test_a_wrong_key_is_401(product: Product) -> None:
    client = openai.OpenAI(base_url=product.base_url, api_key="sk-quire-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as error:
        client.models.list()
    assert error.value.code == "invalid_api_key"


def test_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="nobody", messages=ASK)  # type: ignore[arg-type]
    assert error.value.code == "model_not_found"
    assert error.value.param == "model"


def test_a_bad_value_is_400_and_names_the_field(client: openai.OpenAI, product: Product) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model=product.model,
            messages=ASK,  # type: ignore[arg-type]
            temperature=-1,
        )
    assert error.value.param == "temperature"


def test_a_prompt_over_the_context_is_400_with_both_numbers(
    client: openai.OpenAI, product: Product
) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=product.model, prompt=[10] * 5000, max_tokens=4)


#: Commands, in one process: each of its own takes a second of the processor.
TENANTS = """
from django.core.management import call_command
call_command("create_tenant", "slow", "--requests-per-minute", "2")
call_command("create_key", "--tenant", "slow", "--plain")
call_command("create_tenant", "leaver")
call_command("create_key", "--tenant", "leaver", "--plain", "--name", "old")
"""


@pytest.fixture(scope="module")
def keys(product: Product) -> list[str]:
    """One of a tenant that may ask twice a minute, one of a tenant without a limit."""
    parts = product.manage("shell", "--no-imports", "-c", TENANTS).split()
    return [word for word in parts if word.startswith("sk-quire-")]


def test_over_the_rate_limit_is_429_with_a_time_to_wait(product: Product, keys: list[str]) -> None:
    client = openai.OpenAI(base_url=product.base_url, api_key=keys[0], max_retries=0)

    def ask_four_times() -> None:
        for _ in range(4):
            client.completions.create(model=product.model, prompt=[10, 11], max_tokens=1)

    with pytest.raises(openai.RateLimitError) as error:
        ask_four_times()
    assert float(error.value.response.headers["retry-after"]) > 0


def test_a_revoked_key_is_refused_within_seconds(product: Product, keys: list[str]) -> None:
    import time

    key = keys[1]
    client = openai.OpenAI(base_url=product.base_url, api_key=key, max_retries=0)
    client.models.list()
    product.manage("revoke_key", key)
    deadline = time.monotonic() + 60

    def ask_until_refused() -> None:
        while time.monotonic() < deadline:
            client.models.list()
            time.sleep(0.2)

    with pytest.raises(openai.AuthenticationError):
        ask_until_refused()
