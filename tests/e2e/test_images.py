"""Pictures in a running product: OpenAI's chats and responses, Anthropic's messages."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image

from engine.multimodal.documents import read_pdf
from engine.multimodal.processor import open_image
from tests.e2e.hostile_files import read_or_refused
from tests.e2e.product import Product, product_pids, running
from tests.engine.multimodal.hostile_pictures import hostile_pictures, pillow_pictures
from tests.engine.multimodal.models import IMAGE_TOKEN, expected, llava, picture
from tests.engine.multimodal.pdfs import pdf

pytestmark = pytest.mark.xdist_group("images")
NUM_TOKENS = 10


@dataclass
class Seeing:
    """A product that serves a model that sees, and `transformers` on the same weights."""

    product: Product
    model: Any
    processor: Any

    def expected(self, parts: list[str | Image.Image]) -> str:
        """The answer to one user's message."""
        text = "".join(part if isinstance(part, str) else IMAGE_TOKEN for part in parts)
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        images = [part for part in parts if not isinstance(part, str)]
        tokens = expected(self.model, self.processor, prompt, images, NUM_TOKENS)
        return self.processor.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("llava")
    model, processor = llava(folder / "model")
    flags = ("--model", str(folder / "model"), "--served-model-name", "llava", "--dtype", "float32")
    with running(folder, *flags) as product:
        yield Seeing(product, model, processor)


@pytest.fixture
def client(seeing: Seeing) -> openai.OpenAI:
    product = seeing.product
    return openai.OpenAI(base_url=product.base_url, api_key=product.api_key, max_retries=0)


def data_url(image: Image.Image) -> str:
    """The picture as a lossless file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def chat_parts(parts: list[str | Image.Image]) -> list[Any]:
    """Content as chats have it."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]


def ask(client: openai.OpenAI, parts: list[str | Image.Image], **options: Any) -> Any:
    """One chat completion, greedy."""
    return client.chat.completions.create(
        model="llava",
        messages=[{"role": "user", "content": chat_parts(parts)}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
        **options,
    )


def test_chats_with_pictures_say_what_transformers_says(
    seeing: Seeing, client: openai.OpenAI
) -> None:
    one, two = picture(1, 60, 40), picture(2, 30, 70)
    for parts in ([one, "What?"], ["Compare ", one, " and ", two], ["No picture"]):
        answer = ask(client, parts)
        assert answer.choices[0].message.content == seeing.expected(parts)
    again = ask(client, [one, "What?"])
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert again.usage.prompt_tokens_details.image_tokens == 16
    assert not getattr(answer.usage.prompt_tokens_details, "image_tokens", None)
    streamed = ask(client, [one, "What?"], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == seeing.expected([one, "What?"])


def test_images_are_in_the_ledger_and_have_a_price(seeing: Seeing, client: openai.OpenAI) -> None:
    seeing.product.manage("set_price", "llava", "--input", "0", "--output", "0", "--image", "0.002")
    time.sleep(2.5)  # gateways look prices up anew after two seconds
    answer = ask(client, [picture(9, 60, 40), picture(8, 60, 40), "What?"])
    columns = "image_tokens, images, cost_nanos"
    query = f"SELECT {columns} FROM metering_usageentry WHERE request_id = ?"
    deadline = time.monotonic() + 60
    rows: list[tuple[int, int, int]] = []
    while not rows and time.monotonic() < deadline:
        time.sleep(0.1)
        with closing(sqlite3.connect(seeing.product.data_dir / "quire.sqlite3")) as database:
            rows = list(database.execute(query, (answer.id,)))
    assert rows == [(32, 2, 4_000_000)]


def test_a_placeholder_in_text_is_text(seeing: Seeing, client: openai.OpenAI) -> None:
    one = picture(1, 60, 40)
    with_text = ask(client, [one, f"Is {IMAGE_TOKEN} here?"])
    without = ask(client, [one, "Is  here?"])
    assert with_text.usage.prompt_tokens > without.usage.prompt_tokens + 1
    assert ask(client, [f"Just {IMAGE_TOKEN}"]).choices[0].message.content is not None


def test_responses_and_messages_take_pictures(seeing: Seeing, client: openai.OpenAI) -> None:
    one = picture(3, 50, 50)
    expected = seeing.expected(["See", one])
    response = client.responses.create(
        model="llava",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See"},
                    {"type": "input_image", "image_url": data_url(one), "detail": "auto"},
                ],
            }
        ],
        max_output_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert response.output_text == expected
    product = seeing.product
    claude = anthropic.Anthropic(base_url=product.url, api_key=product.api_key, max_retries=0)
    message = claude.messages.create(
        model="llava",
        max_tokens=NUM_TOKENS,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "See"},
                    {
                        "type": "image",
                        "source": {
                            "type": "base64",
                            "media_type": "image/png",
                            "data": data_url(one).partition(",")[2],
                        },
                    },
                ],
            }
        ],
        extra_body={"ignore_eos": True, "temperature": 0},
    )
    assert message.content[0].text == expected


def test_uploaded_files_are_pictures_by_their_id(seeing: Seeing, client: openai.OpenAI) -> None:
    one = picture(3, 50, 50)
    file = io.BytesIO()
    one.save(file, "PNG")
    uploaded = client.files.create(file=("one.png", file.getvalue()), purpose="vision")
    expected_text = seeing.expected(["See", one])
    options: Any = {"temperature": 0, "extra_body": {"ignore_eos": True}, "model": "llava"}
    response = client.responses.create(
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See"},
                    {"type": "input_image", "file_id": uploaded.id, "detail": "auto"},
                ],
            }
        ],
        max_output_tokens=NUM_TOKENS,
        **options,
    )
    assert response.output_text == expected_text
    parts: Any = [{"text": "See"}, {"image_url": data_url(one), "uuid": "another's"}]
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": parts}], max_tokens=NUM_TOKENS, **options
    )
    assert answer.choices[0].message.content == expected_text
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(
            input=[
                {
                    "role": "user",
                    "content": [{"type": "input_image", "file_id": "file-0", "detail": "auto"}],
                }
            ],
            **options,
        )
    assert "content[0]" in str(refused.value.param)


def test_results_of_tools_may_be_pictures(seeing: Seeing, client: openai.OpenAI) -> None:
    one = picture(3, 50, 50)
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_image", "image_url": data_url(one), "detail": "auto"}],
    }
    conversation: Any = [{"role": "user", "content": "Look"}, call, result]
    without: Any = [*conversation[:2], {**result, "output": "nothing"}]
    counts = []
    for items in (conversation, without):
        response = client.responses.create(model="llava", input=items, max_output_tokens=1)
        assert response.usage is not None
        counts.append(response.usage.input_tokens)
    assert counts[0] > counts[1] + 8
    product = seeing.product
    claude = anthropic.Anthropic(base_url=product.url, api_key=product.api_key, max_retries=0)
    image = {"type": "base64", "media_type": "image/png", "data": data_url(one).partition(",")[2]}
    content: Any = [{"type": "image", "source": image}]
    messages: Any = [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}],
        },
    ]
    message = claude.messages.create(model="llava", max_tokens=1, messages=messages)
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == counts[0]


def test_pages_of_a_document_are_seen_and_read(seeing: Seeing, client: openai.OpenAI) -> None:
    data = pdf(["Hello", "world"])
    first, second = (open_image(page.image) for page in read_pdf(data, max_images=64))
    expected_text = seeing.expected(
        ["a.pdf\nPage 1 of 2:\n", first, "Hello\n", "Page 2 of 2:\n", second, "world\n", "Sum up"]
    )
    url = "data:application/pdf;base64," + base64.b64encode(data).decode()
    file = {"file_data": url, "filename": "a.pdf"}
    parts: Any = [{"type": "file", "file": file}, {"type": "text", "text": "Sum up"}]
    options: Any = {"model": "llava", "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(
        messages=[{"role": "user", "content": parts}], max_tokens=NUM_TOKENS, **options
    )
    assert answer.choices[0].message.content == expected_text
    assert answer.usage.prompt_tokens_details.image_tokens == 32
    content: Any = [{"type": "input_file", **file}, {"type": "input_text", "text": "Sum up"}]
    response = client.responses.create(
        input=[{"role": "user", "content": content}], max_output_tokens=NUM_TOKENS, **options
    )
    assert response.output_text == expected_text
    many: Any = [{"type": "file", "file": file}] * 33
    with pytest.raises(openai.BadRequestError, match="at most 64 images"):
        client.chat.completions.create(messages=[{"role": "user", "content": many}], **options)


def test_batches_hold_pictures_and_documents(seeing: Seeing, client: openai.OpenAI) -> None:
    one, data = picture(5, 40, 40), pdf(["Hello"])
    (page,) = read_pdf(data, max_images=64)
    document = {"file_data": base64.b64encode(data).decode()}
    contents: Any = {
        "picture": [*chat_parts([one]), {"type": "text", "text": "What?"}],
        "document": [{"type": "file", "file": document}, {"type": "text", "text": "What?"}],
    }
    options = {"model": "llava", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {**options, "messages": [{"role": "user", "content": content}]},
        }
        for name, content in contents.items()
    ]
    file = "\n".join(map(json.dumps, lines)).encode()
    uploaded = client.files.create(file=("requests.jsonl", file), purpose="batch")
    batch = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < deadline:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.output_file_id is not None, batch
    results = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    answers = {
        result["custom_id"]: result["response"]["body"]["choices"][0]["message"]["content"]
        for result in results
    }
    assert answers == {
        "picture": seeing.expected([one, "What?"]),
        "document": seeing.expected([open_image(page.image), "Hello\n", "What?"]),
    }


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64,AAAA",
        "data:image/png;base64,!!!",
        "data:image/png,plain",
        "http://127.0.0.1:1/x.png",
        "http://localhost/x.png",
        "file:///etc/passwd",
        "ftp://example.com/x.png",
        "",
    ],
)
def test_fault_17_addresses_that_may_not_be_read_are_refused_by_part(
    client: openai.OpenAI, url: str
) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="llava", messages=[{"role": "user", "content": parts}], max_tokens=1
        )
    assert refused.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.slow)])
def test_fault_36_hostile_pictures_are_read_or_refused_by_part_in_bounded_memory(
    seeing: Seeing, count: int
) -> None:
    statuses = read_or_refused(seeing.product, "llava", "image_url", hostile_pictures(count))
    assert statuses.total() == count
    assert statuses["bomb", 400]
    assert statuses["palette_with_alpha", 200]


@pytest.mark.slow
def test_fault_36_the_pictures_that_pillow_is_tested_with_harm_no_product(
    seeing: Seeing, tmp_path: Path
) -> None:
    files = (file for file in pillow_pictures(tmp_path) if len(file[1]) < 7 << 20)  # as base64
    statuses = read_or_refused(seeing.product, "llava", "image_url", files)
    by_status = Counter(status for _, status in statuses.elements())
    assert by_status[200] > 600
    assert by_status[400] > 300


def test_more_pictures_than_a_request_may_have_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 64 images"):
        ask(client, [picture(1, 8, 8)] * 65)


def test_a_killed_engine_goes_on_with_the_picture(seeing: Seeing, client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "llava",
        "messages": [{"role": "user", "content": chat_parts([picture(4, 60, 60), "Tell"])}],
        "max_tokens": 900,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    full_content = client.chat.completions.create(**arguments).choices[0].message.content
    (pid,) = product_pids(seeing.product, "engine.serving")
    text = ""
    for number, chunk in enumerate(client.chat.completions.create(**arguments, stream=True)):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if number == 1:
            os.kill(pid, signal.SIGKILL)
    assert text == full_content
    assert product_pids(seeing.product, "engine.serving") != [pid]
