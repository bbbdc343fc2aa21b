"""What a download from the hub will be, told before it begins: from a hub on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.template.defaultfilters import filesizeformat
from huggingface_hub import snapshot_download

from catalog.checkpoint import read_checkpoint
from catalog.hub import downloaded, get_download_info, search_hub
from catalog.models import ServedModel
from common.errors import HubUnavailable
from engine.contract.errors import InvalidRequest
from tests.console.conftest import Login
from tests.console.test_models_page import DEMO, form
from tests.fakes.hub import Hub
from tests.fakes.mcp_server import serving

REPOSITORY = "someone/tiny"
pytestmark = pytest.mark.usefixtures("rows")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """It has the demo model, and a file that no load fetches."""
    folder = tmp_path / "hub"
    shutil.copytree(DEMO, folder)
    (folder / "pytorch_model.bin").write_bytes(bytes(10_000_000))
    with Hub(REPOSITORY, folder) as hub:
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield hub


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    """Settings of a load: an empty cache."""
    return {"download_dir": str(tmp_path / "cache")}


def download_bytes(hub: Hub) -> int:
    """Bytes of what a load fetches."""
    kinds = (".json", ".safetensors", ".jinja")
    return sum(file.stat().st_size for file in hub.files() if file.suffix in kinds)


def weights(hub: Hub) -> list[str]:
    """The ranges of weights that were asked for."""
    return [r for way, path, r in hub.asked if way == "GET" and path.endswith(".safetensors")]


def test_the_form_says_how_much_it_is_and_what_it_needs(
    login: Login, hub: Hub, cache: dict[str, str]
) -> None:
    asked = form(
        source=REPOSITORY, name="tiny", look="1", **{"s.download_dir": cache["download_dir"]}
    )
    page = login("root").post("/console/models/add/", asked)
    text = page.content.decode()
    assert page.status_code == 200
    assert f"<dt>To download</dt><dd>{filesizeformat(download_bytes(hub))}," in text
    for expected_text in (
        "LlamaForCausalLM",
        "Weights in memory",
        "Free on the disk now",
        "It fits.",
    ):
        assert expected_text in text, expected_text
    # The headers of the weights, and no more of them.
    assert weights(hub) == ["bytes=0-100000"]
    assert not ServedModel.objects.filter(name="tiny").exists()
    assert not Path(cache["download_dir"]).exists()


def test_the_estimate_is_the_one_of_the_files_themselves(hub: Hub, cache: dict[str, str]) -> None:
    download_info = get_download_info(REPOSITORY, cache)
    assert download_info.checkpoint == read_checkpoint(Path(DEMO))
    assert (download_info.nbytes, download_info.cached_bytes, download_info.remaining_bytes) == (
        download_bytes(hub),
        0,
        download_bytes(hub),
    )
    assert download_info.fits


def test_shards_are_told_by_their_index(hub: Hub, cache: dict[str, str]) -> None:
    (hub.folder / "model.safetensors").rename(hub.folder / "one.safetensors")
    index = hub.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "../x.safetensors"}}))
    assert get_download_info(REPOSITORY, cache).checkpoint == read_checkpoint(Path(DEMO))
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert get_download_info(REPOSITORY, cache).checkpoint is None


def test_the_hub_is_not_asked_for_models_of_modelscope(
    hub: Hub, cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_download(REPOSITORY, cache_dir=cache["download_dir"])
    assert downloaded(REPOSITORY, cache) is not None
    hub.asked.clear()
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert downloaded(REPOSITORY, cache) is None
    for ask in (lambda: get_download_info(REPOSITORY, cache), lambda: search_hub("tiny")):
        with pytest.raises(HubUnavailable, match="VLLM_USE_MODELSCOPE is set"):
            ask()
    assert hub.asked == []


@pytest.mark.parametrize(
    "content", [b"{", (1 << 63).to_bytes(8, "little"), b"\2" + bytes(7) + b"{}"]
)
def test_weights_that_are_none_still_have_a_size(
    hub: Hub, cache: dict[str, str], content: bytes
) -> None:
    (hub.folder / "model.safetensors").write_bytes(content)
    download_info = get_download_info(REPOSITORY, cache)
    assert download_info.nbytes == download_bytes(hub)
    assert download_info.checkpoint is None or download_info.checkpoint.parameters == 0


def test_a_models_page_and_the_api_ask_when_they_are_asked(
    login: Login, hub: Hub, cache: dict[str, str]
) -> None:
    model = ServedModel.objects.create(name="tiny", source=REPOSITORY, settings=cache)
    root = login("root")
    page = root.get(f"/console/models/{model.pk}/").content.decode()
    assert "asks the hub for their size" in page
    assert hub.asked == []
    text = root.get(f"/console/models/{model.pk}/?hub=yes&sequences=2").content.decode()
    assert "To download" in text
    assert "KV cache of 2 sequences" in text
    answer = root.get(f"/api/models/{model.pk}/download/").json()
    assert (answer["nbytes"], answer["there"], answer["fits"]) == (download_bytes(hub), 0, True)
    assert root.get(f"/api/models/{model.pk}/need/").json()["fits"] is True
    owner = login("ada").get(f"/console/models/{model.pk}/?hub=yes")
    assert "To download" not in owner.content.decode()


def test_what_was_downloaded_is_known_without_the_hub(
    login: Login, hub: Hub, cache: dict[str, str]
) -> None:
    snapshot_download(REPOSITORY, cache_dir=cache["download_dir"], allow_patterns=["*.json"])
    part = sum(file.stat().st_size for file in hub.files() if file.suffix == ".json")
    assert get_download_info(REPOSITORY, cache).cached_bytes == part
    snapshot_download(REPOSITORY, cache_dir=cache["download_dir"])
    hub.asked.clear()
    model = ServedModel.objects.create(name="tiny", source=REPOSITORY, settings=cache)
    page = login("root").get(f"/console/models/{model.pk}/").content.decode()
    assert "Weights in memory" in page
    assert "LlamaForCausalLM" in login("root").get("/console/models/").content.decode()
    assert hub.asked == []


CARDS: dict[str, dict[str, Any]] = {
    "someone/tiny": {
        "downloads": 1234,
        "pipeline_tag": "text-generation",
        "gated": False,
        "cardData": {"license": "apache-2.0"},
        "config": {"architectures": ["Qwen3ForCausalLM"]},
        "safetensors": {"parameters": {"BF16": 1_000_000, "F32": 500}, "total": 1_000_500},
    },
    "someone/tiny-huge": {
        "downloads": 5,
        "gated": "manual",
        "cardData": {"license": "other", "license_name": "huge-license"},
        "safetensors": {"parameters": {"F8_E4M3": 10**15}, "total": 10**15},
    },
    "someone/tiny-gguf": {"downloads": 7, "gated": False},
}


def test_the_hub_is_searched_where_a_model_is_added(login: Login, hub: Hub) -> None:
    hub.cards = CARDS
    page = login("root").get("/console/models/add/", {"q": "tiny"})
    tiny, huge, gguf = page.context["results"]
    assert (tiny.nbytes, tiny.license, tiny.downloads) == (2_002_000, "apache-2.0", 1234)
    assert (tiny.fits, tiny.gated, tiny.architecture) == (True, False, "Qwen3ForCausalLM")
    assert (huge.fits, huge.gated, huge.license) == (False, True, "huge-license")
    assert (gguf.fits, gguf.nbytes, gguf.license) == (None, None, "")
    text = page.content.decode()
    assert "?source=someone%2Ftiny&amp;name=tiny" in text
    assert "HF_TOKEN" in text
    assert (
        "No model of the hub matches."
        in login("root").get("/console/models/add/", {"q": "nothing"}).content.decode()
    )
    by_api = login("root").get("/api/models/hub/", {"q": "tiny"}).json()
    assert [row["fits"] for row in by_api] == [True, False, None]
    assert login("ada").get("/api/models/hub/", {"q": "tiny"}).status_code == 403
    assert login("root").get("/api/models/hub/").status_code == 400


def test_without_a_hub_a_search_says_so_in_one_sentence(
    login: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    page = login("root").get("/console/models/add/", {"q": "tiny"})
    assert page.status_code == 200
    assert "No hub can be reached from here" in page.content.decode()


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>Log in</html>",
        b"[{}]",
        b"[1]",
        b'{"error": "x"}',
        b'[{"id": "a/b", "safetensors": 1}]',
    ],
)
def test_an_answer_that_is_no_hubs_is_an_error_of_the_search(
    login: Login, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    with serving(app) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        page = login("root").get("/console/models/add/", {"q": "tiny"})
    assert page.status_code == 200
    assert page.context["search_error"].code == "hub_unavailable"


def test_a_hub_that_does_not_answer_is_named(
    login: Login, hub: Hub, cache: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {**form(name="tiny", look="1"), "source": "someone/else"}
    page = login("root").post("/console/models/add/", asked).content.decode()
    assert "has no repository someone/else" in page
    model = ServedModel.objects.create(name="tiny", source="someone/else", settings=cache)
    answer = login("root").get(f"/api/models/{model.pk}/download/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "hub_unavailable")
    with pytest.raises(InvalidRequest) as invalid_error:
        get_download_info("some one/else", cache)
    assert invalid_error.value.param == "source"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    off = login("root").get(f"/console/models/{model.pk}/?hub=yes").content.decode()
    assert "is disabled (HF_HUB_OFFLINE)" in off
