"""Everything at once through a PgBouncer that gives each transaction another connection."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.product import Product, running
from tests.services import running_pgbouncer, running_postgresql
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
ASK = [{"role": "user", "content": "What is the capital of France?"}]


def check_chats(client: openai.OpenAI, model: str) -> None:
    def answer(number: int) -> str:
        reply = client.chat.completions.create(model=model, messages=ASK, temperature=0, n=1)
        return reply.choices[0].message.content or ""

    with ThreadPoolExecutor(16) as threads:
        assert all("Paris" in text for text in threads.map(answer, range(64)))


def check_adapter(product: Product, client: openai.OpenAI) -> None:
    folder = ROOT / "demo" / "adapters" / "butler"
    product.manage("load_adapter", str(folder), "--model", product.model, "--name", "served")
    wait_until(lambda: "served" in [model.id for model in client.models.list()])
    reply = client.chat.completions.create(model="served", messages=ASK, max_tokens=8)
    assert reply.choices[0].message.content


def check_batch(client: openai.OpenAI, model: str) -> None:
    body = {"model": model, "messages": ASK, "max_tokens": 8, "temperature": 0}
    about = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number)} | about) for number in range(50)]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    wait_until(
        lambda: client.batches.retrieve(batch.id).status == "completed", "completed", timeout_s=120
    )
    output = client.batches.retrieve(batch.id).output_file_id
    assert output
    rows = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    assert {row["custom_id"] for row in rows} == {str(number) for number in range(50)}
    assert all(row["response"]["status_code"] == 200 for row in rows)


def check_pages(product: Product) -> None:
    with httpx.Client(base_url=product.url, follow_redirects=True, timeout=60) as browser:
        page = browser.get("/admin/")
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)
        assert token
        form = {"login": product.admin_user, "password": product.admin_password}
        page = browser.post(str(page.url), data=form | {"csrfmiddlewaretoken": token[1]})
        assert "Raw data" in page.text
        paths = set(re.findall(r'href="(/admin/\w+/\w+/)"', page.text))
        assert len(paths) > 10
        for path in ("/console/", *sorted(paths)):
            assert browser.get(path).status_code == 200, path


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(540)
def test_chats_adapters_batches_and_pages_work_through_a_pgbouncer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_postgresql() as server, running_pgbouncer(server) as url:
        monkeypatch.setenv("DATABASE_URL", url)  # of commands
        flags = ("--workers", "2")
        with (
            running(tmp_path, *flags, DATABASE_URL=url) as product,
            openai.OpenAI(base_url=product.base_url, api_key=product.api_key, timeout=60) as client,
        ):
            check_chats(client, product.model)
            check_adapter(product, client)
            check_batch(client, product.model)
            check_pages(product)
            assert "They agree." in product.manage("reconcile_usage")
        log = (tmp_path / "up.log").read_text()
    assert "Traceback" not in log, log[-5000:]
