"""The commands of a running instance, as a person types them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import openai
import pytest
from django.core.management import call_command

from tests.e2e.product import ROOT, Product, clean_environment
from tests.engine.models import make_model
from tests.waiting import wait_until


def test_a_model_is_loaded_served_listed_and_unloaded(
    product: Product, client: openai.OpenAI, tmp_path: Path
) -> None:
    folder, initial = make_model("qwen3", tmp_path / "tiny"), listed(client)
    product.manage(
        *("load_model", str(folder), "--name", "tiny", "--max-model-len", "256"),
        *("--num-gpu-blocks-override", "32", "--wait"),
    )
    assert product.model in initial
    assert listed(client) == initial | {"tiny"}
    answer = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert "tiny" in product.manage("list_models")
    product.manage("unload_model", "tiny", "--wait")
    wait_until(lambda: "tiny" not in listed(client))  # gateways look it up anew every two seconds
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny", prompt=[5], max_tokens=1)
    # The other model never noticed.
    client.completions.create(model=product.model, prompt=[5], max_tokens=1)


def listed(client: openai.OpenAI) -> set[str]:
    """The models, without their adapters."""
    return {model.id for model in client.models.list() if not getattr(model, "parent", None)}


def test_a_folder_that_is_no_model_is_refused_with_the_reason(
    product: Product, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="config"):
        product.manage("load_model", str(tmp_path), "--name", "nothing", "--wait")


def test_the_terminal_chat_streams_an_answer(product: Product) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "manage.py", "chat", "--data-dir", str(product.data_dir)),
            *("--url", product.url, "--api-key", product.api_key),
        ],
        cwd=ROOT,
        env=clean_environment(),
        input="What is the capital of France?\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_every_request_is_in_the_ledger_once(product: Product, client: openai.OpenAI) -> None:
    initial = settled(product)
    for _ in range(3):
        client.completions.create(model=product.model, prompt=[10, 11, 12], max_tokens=5)
    stream = client.completions.create(
        model=product.model, prompt=[10, 11, 12], max_tokens=5, stream=True
    )
    for _ in stream:
        pass
    deadline = time.monotonic() + 60
    while ledger(product)[0] < initial[0] + 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    after = ledger(product)
    assert after[0] == initial[0] + 4
    assert after[1] == initial[1] + 12


def settled(product: Product) -> tuple[int, int]:
    """The ledger once nothing of earlier requests comes any more: that takes half a second."""
    seen, since = ledger(product), time.monotonic()
    while time.monotonic() < since + 3:
        time.sleep(0.1)
        if (now := ledger(product)) != seen:
            seen, since = now, time.monotonic()
    return seen


def ledger(product: Product) -> tuple[int, int]:
    """(entries, prompt tokens) of the usage ledger."""
    query = "SELECT count(*), coalesce(sum(prompt_tokens), 0) FROM metering_usageentry"
    with closing(sqlite3.connect(product.data_dir / "quire.sqlite3")) as database:
        (row,) = database.execute(query)
    return row


@pytest.mark.parametrize("form", ["latency", pytest.param("throughput", marks=pytest.mark.slow)])
def test_bench_prints_figures_with_their_ceilings(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        "latency": ["--input-len", "8", "--output-len", "4", "--repeats", "1"],
        "throughput": ["--input-len", "8", "--output-len", "4", "--num-prompts", "3"],
    }
    out = tmp_path / "figures.json"
    arguments = [*flags[form], "--json", str(out), "--num-gpu-blocks-override", "64"]
    call_command("bench", form, *arguments)
    row = json.loads(out.read_text())
    assert row["benchmark"] == form
    assert (row["weights"], row["model"]) == ("bfloat16", str(ROOT / "demo" / "model"))
    percent = "decode_bandwidth_percent" if form == "latency" else "sgemm_percent"
    assert row[percent] > 0
    assert percent in capsys.readouterr().out


def test_bench_serve_measures_the_running_server(product: Product, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    product.manage(
        *("bench", "serve", "--url", product.url, "--model", product.model),
        *("--api-key", product.api_key, "--concurrency", "1,4", "--num-prompts", "6"),
        *("--input-len", "8-16", "--output-len", "4-8", "--json", str(out)),
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["concurrency"] for row in rows] == [1, 4]
    assert all(row["completed"] == 6 and row["failed"] == 0 for row in rows)
    assert all(row["itl_p99_ms"] > 0 for row in rows)
