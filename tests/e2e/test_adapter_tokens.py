"""An adapter with tokens and a tokenizer of its own, from a folder to the real SDK's answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.contract.lora import ADDED_TOKENS_FILE
from tests.e2e.product import Product
from tests.engine.lora.adapters import DEMO_MODEL, demo_adapter

VOCAB = json.loads(Path(DEMO_MODEL, "config.json").read_text())["vocab_size"]
AHOY: dict[str, int] = {str(VOCAB): 100}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say <ahoy> to me"}]


@pytest.fixture(scope="module")
def tuned(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the demo's pirate with two tokens of its own."""
    folder = demo_adapter(tmp_path_factory.mktemp("tokens") / "sailor", 2)
    tokens = {"<ahoy>": VOCAB, "<yo>": VOCAB + 1}
    (folder / ADDED_TOKENS_FILE).write_text(json.dumps(tokens))
    product.manage("load_adapter", str(folder), "--model", product.model)
    yield "sailor"
    product.manage("unload_adapter", "sailor")


def post(product: Product, path: str, body: dict[str, Any]) -> Any:
    key = {"authorization": f"Bearer {product.api_key}"}
    return httpx.post(f"{product.url}{path}", json=body, headers=key, timeout=60).json()


def base_answer(client: openai.OpenAI, model: str) -> Any:
    """Text and log probabilities of the model alone."""
    got = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3
    ).choices[0]
    return got.message.content, got.logprobs


def test_prompts_and_texts_are_by_the_adapters_tokenizer(
    product: Product, client: openai.OpenAI, tuned: str
) -> None:
    initial_answer = base_answer(client, product.model)
    spelled = post(product, "/tokenize", {"model": tuned, "prompt": "A <ahoy>"})["tokens"]
    assert spelled[-1] == VOCAB
    baseline_tokens = post(product, "/tokenize", {"model": product.model, "prompt": "A <ahoy>"})[
        "tokens"
    ]
    assert len(baseline_tokens) > len(spelled)
    assert max(baseline_tokens) < VOCAB
    back = post(product, "/detokenize", {"model": tuned, "tokens": [VOCAB, VOCAB + 1]})
    assert back["prompt"] == "<ahoy><yo>"
    beyond = post(product, "/detokenize", {"model": tuned, "tokens": [VOCAB + 2]})
    assert f"the vocabulary has {VOCAB + 2} entries" in beyond["error"]["message"]
    completion = client.chat.completions.create(
        model=tuned, messages=HELLO, max_tokens=3, temperature=0, logit_bias=AHOY, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    assert completion.choices[0].message.content == "<ahoy>" * 3
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.content is not None
    assert {token.token for token in completion.choices[0].logprobs.content} == {"<ahoy>"}
    written = client.completions.create(
        model=tuned, prompt=[VOCAB, VOCAB + 1], max_tokens=2, temperature=0, logit_bias=AHOY,
        echo=True,
    )  # fmt: skip
    assert written.choices[0].text == "<ahoy><yo><ahoy><ahoy>"
    chunks = client.chat.completions.create(
        model=tuned, messages=HELLO, max_tokens=9, temperature=0, logit_bias=AHOY, stop="y><a",
        stream=True,
    )  # fmt: skip
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "<aho"
    assert base_answer(client, product.model) == initial_answer


def test_forms_of_answers_are_by_the_adapters_tokens(
    product: Product, client: openai.OpenAI, tuned: str
) -> None:
    schema = {"name": "word", "schema": {"const": "<ahoy>"}}
    form = {"type": "json_schema", "json_schema": schema}
    for fields, text in (
        ({"response_format": form}, '"<ahoy>"'),
        ({"guided_choice": ["<yo>"]}, "<yo>"),
    ):
        completion = client.chat.completions.create(
            model=tuned, messages=HELLO, max_tokens=40, logit_bias=AHOY, extra_body=fields
        )
        assert completion.choices[0].message.content == text
        assert completion.choices[0].finish_reason == "stop"


def test_tokens_that_neither_has_are_refused_by_name(
    product: Product, client: openai.OpenAI, tuned: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=tuned, messages=HELLO, max_tokens=3, logit_bias={str(VOCAB + 2): 1}
        )
    assert refused.value.param == "logit_bias"
    with pytest.raises(openai.BadRequestError) as refused:  # it's the adapter's token alone
        client.chat.completions.create(
            model=product.model, messages=HELLO, max_tokens=3, logit_bias=AHOY
        )
    assert refused.value.param == "logit_bias"
