"""`hf_hub_resolver`: adapters of named repositories, from a hub on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters import resolution as resolving
from adapters.models import Adapter, AdapterVersion
from adapters.resolvers import lora_resolvers
from common.db import run_in_db_thread
from engine.contract.errors import ConfigError
from engine.contract.lora import WEIGHTS_FILE, adapter_digest
from tests.fakes.hub import Hub
from tests.inference.adapter_requests import ask, digest_of, newcomer
from tests.inference.conftest import Gateway
from tests.inference.test_lora_resolvers import afresh, lora

__all__ = ["afresh"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("adapter_store")]
REPOSITORY = "someone/tones"


@pytest.fixture
def named(settings: Any) -> Callable[..., None]:
    """Has the operator name repositories."""

    def name(*repositories: str) -> None:
        settings.QUIRE = settings.QUIRE.replace(lora_resolver_hf_repo_list=list(repositories))
        resolving.forget()

    return name


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository."""
    folder = tmp_path / "hub"
    folder.mkdir()
    with Hub(REPOSITORY, folder) as hub:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield hub


def fetched(hub: Hub) -> list[str]:
    """Names of the files whose bytes the hub was asked for, in order."""
    paths = [path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]
    return [path.partition("/resolve/")[2].partition("/")[2] for path in paths]


async def test_an_adapter_of_a_named_repository_is_found_by_each_tenant(
    gateway: Gateway, hub: Hub, named: Callable[..., None]
) -> None:
    named(f"{REPOSITORY}@main")
    top = adapter_digest(lora(hub.folder))
    lora(hub.folder / "sql" / "large", 1)
    (hub.folder / "sql" / "large" / "added_tokens.json").write_text("{}")
    inner = adapter_digest(hub.folder / "sql" / "large")
    lora(hub.folder / "other", 2, base="another-model")
    (hub.folder / "run.py").write_text("raise SystemExit")
    _, theirs = await run_in_db_thread(newcomer)
    async with gateway.serving(gateway.fake()) as replica:
        assert await digest_of(gateway.client, REPOSITORY) == top
        assert await digest_of(gateway.client, f"fake:{REPOSITORY}/sql/large") == inner
        assert await digest_of(theirs, f"{REPOSITORY}/sql/large") == inner
        for name in ("other", "nothing", "sql", "../tones", "sql/../sql/large", "sql//large"):
            assert (await ask(gateway.client, f"{REPOSITORY}/{name}")).status == 404, name
    # The weights once, whoever asks; nothing else of the repository, and none of another model's.
    weights = [name for name in fetched(hub) if name.endswith(WEIGHTS_FILE)]
    assert weights == [WEIGHTS_FILE, f"sql/large/{WEIGHTS_FILE}"]
    assert {name.rpartition("/")[2] for name in fetched(hub)} == {
        "adapter_config.json",
        WEIGHTS_FILE,
        "added_tokens.json",
    }
    assert [request.adapter.digest for request in replica.received if request.adapter] == [
        top,
        inner,
        inner,
    ]
    sources = await run_in_db_thread(
        lambda: set(AdapterVersion.objects.values_list("source", flat=True))
    )
    assert sources == {"resolver:hf_hub_resolver"}


async def test_nobody_asks_the_hub_for_another_repository(
    gateway: Gateway, hub: Hub, named: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lora(hub.folder)
    async with gateway.serving(gateway.fake()):
        assert (await ask(gateway.client, REPOSITORY)).status == 404  # none is named by default
        named("someone/else")
        for name in (REPOSITORY, "someone", "a/b/c", "fake:a/b"):
            assert (await ask(gateway.client, name)).status == 404, name
        named(REPOSITORY)
        monkeypatch.setenv("QUIRE_PLUGINS", "another")
        resolving.forget()
        assert (await ask(gateway.client, REPOSITORY)).status == 404
    assert hub.asked == []


async def test_what_is_no_adapter_is_told_and_a_hub_in_trouble_is_no_404(
    gateway: Gateway,
    hub: Hub,
    named: Callable[..., None],
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    named(REPOSITORY, "someone/gone")
    lora(hub.folder / "pickled")
    (hub.folder / "pickled" / WEIGHTS_FILE).rename(hub.folder / "pickled" / "adapter_model.bin")
    lora(hub.folder / "tokens")
    (hub.folder / "tokens" / "new_embeddings.bin").write_bytes(b"")
    lora(hub.folder / "large")
    (hub.folder / "large" / WEIGHTS_FILE).write_bytes(b"\0" * 2000)
    settings.QUIRE = settings.QUIRE.replace(max_adapter_bytes=1024)
    async with gateway.serving(gateway.fake()):
        for name, words in (
            ("pickled", "adapter_model.bin is a pickle"),
            ("tokens", "new_embeddings.bin is a pickle"),
            ("large", "has more than 1024 bytes"),
        ):
            reply = await ask(gateway.client, f"{REPOSITORY}/{name}")
            assert (reply.status, reply.error["code"]) == (400, "invalid_adapter"), name
            assert words in reply.error["message"]
        reply = await ask(gateway.client, "someone/gone")
        assert (reply.status, reply.error["code"]) == (503, "service_unavailable")
        assert hub.url not in reply.error["message"]
        assert (await ask(gateway.client, "fake")).status == 200
    (reported,) = [record for record in caplog.records if record.name == "adapters.resolution"]
    assert "has no repository someone/gone" in reported.getMessage()
    assert reported.exc_info is None  # a line, not pages
    assert fetched(hub) == []
    assert await run_in_db_thread(Adapter.objects.count) == 0


def test_a_name_that_is_no_repository_is_refused(named: Callable[..., None]) -> None:
    named("someone")
    with pytest.raises(ConfigError, match="must hold owner/name or owner/name@revision; someone"):
        lora_resolvers()
