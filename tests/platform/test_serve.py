"""`quire serve` with vLLM's command line, in a process of its own with a fake replica."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import call_command, load_command_class
from django.core.management.base import CommandError

from tests.database import with_tables
from tests.platform.instance import ROOT, Instance, certificate, tiny_model_folder

pytestmark = pytest.mark.system

API_KEY = "token-abc123"
MIDDLEWARE = """
class Mark:
    def __init__(self, application):
        self.application = application

    async def __call__(self, scope, receive, send):
        async def marked(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-marked", b"yes")]
            await send(message)

        await self.application(scope, receive, marked if scope["type"] == "http" else send)
"""


@pytest.fixture(scope="module")
def served(short_tmp: Path) -> Iterator[dict[str, Any]]:
    model = tiny_model_folder(short_tmp / "tiny")
    (short_tmp / "our_middleware.py").write_text(MIDDLEWARE)
    (short_tmp / "settings.yaml").write_text("response_role: narrator\nmax-model-len: 512\n")
    cert, key = certificate(short_tmp)
    with Instance(
        with_tables(short_tmp / "serve"),
        *("--ssl-certfile", cert, "--ssl-keyfile", key),
        *("--ssl-ca-certs", cert, "--ssl-cert-reqs", "2"),
        *("--model", str(model), "--served-model-name", "first", "second", "third"),
        *("--api-key", API_KEY, "--config", str(short_tmp / "settings.yaml")),
        *("--middleware", "our_middleware.Mark", "--root-path", "/quire"),
        *("--allowed-origins", '["https://a.example"]', "--allow-credentials", "True"),
        *("--allowed-methods", '["GET"]', "--allowed-headers", '["X-Ours"]'),
        *("-tp", "1", "--swap_space=0", "--enable-auto-tool-choice=false", "--no-worker"),
        *("--enable_per_request_metrics", "--trust-request-chat-template"),
        *("--h11-max-header-count", "64", "--enable-force-include-usage"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
        PYTHONPATH=str(short_tmp),
    ) as instance:
        tls = ssl.create_default_context(cafile=cert)
        tls.check_hostname = False  # its address isn't in the certificate
        tls.load_cert_chain(cert, key)
        running = instance.ready()
        with httpx.Client(verify=tls, base_url=running["url"], timeout=60) as client:
            yield {**running, "client": client, "data_dir": instance.data_dir}


def get(served: dict[str, Any], path: str, key: str = API_KEY, **headers: str) -> httpx.Response:
    return served["client"].get(path, headers={"Authorization": f"Bearer {key}", **headers})


def test_clients_need_a_certificate_and_only_the_start_has_one_of_its_own(
    served: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{served['url']}/v1/models", verify=False)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    stranger.load_cert_chain(*certificate(tmp_path))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{served['url']}/v1/models", verify=stranger)
    # Nobody can use the start's: what it signed with is nowhere.
    data_dir = served["data_dir"]
    assert data_dir.joinpath("client-authorities.pem").read_bytes().count(b"BEGIN CERT") == 2
    texts = [path.read_bytes() for path in data_dir.glob("*") if path.is_file()]
    assert not any(b"BEGIN PRIVATE KEY" in text for text in texts)


def test_a_model_has_several_names(served: dict[str, Any]) -> None:
    listed = get(served, "/v1/models").json()["data"]
    assert sorted(model["id"] for model in listed) == ["first", "second", "third"]
    assert {model["root"] for model in listed} == {"first"}
    for name in ("first", "second", "third"):
        answer = (
            served["client"]
            .post(
                "/v1/chat/completions",
                headers={"Authorization": f"Bearer {API_KEY}"},
                json={
                    "model": name,
                    "messages": [{"role": "user", "content": "Hi"}],
                    "max_tokens": 2,
                    "chat_template": "{{ messages[0]['content'] }}",
                },
            )
            .json()
        )
        assert answer["model"] == "first"
        assert "metrics" in answer
        assert answer["choices"][0]["message"]["role"] == "narrator"
    assert get(served, "/v1/models/fourth").status_code == 404


def test_streams_end_with_their_usage_and_templates_have_the_servers_variables(
    served: dict[str, Any],
) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 2,
        "chat_template": "{{ enable_thinking is false }}",
    }
    streamed = served["client"].post(
        "/v1/chat/completions", headers=headers, json=chat | {"stream": True}
    )
    *_, last, done = streamed.text.strip().split("\n\n")
    assert done.endswith("[DONE]")
    assert json.loads(last[last.index("{") :])["usage"]["completion_tokens"] == 2
    rendered = served["client"].post("/v1/chat/completions/render", headers=headers, json=chat)
    tokens = {"tokens": rendered.json()["token_ids"]}
    text = served["client"].post("/detokenize", headers=headers, json=tokens).json()["prompt"]
    assert text == "True"


def test_keys_of_ones_own_work_beside_those_that_are_made(served: dict[str, Any]) -> None:
    assert get(served, "/v1/models", served["api_key"]).status_code == 200
    for invalid in (f"{API_KEY}4", API_KEY[:-1], API_KEY.upper(), "given-"):
        assert get(served, "/v1/models", invalid).status_code == 401


def test_middleware_sees_every_answer(served: dict[str, Any]) -> None:
    assert get(served, "/v1/models").headers["x-marked"] == "yes"
    assert get(served, "/login/").headers["x-marked"] == "yes"


def test_pages_of_other_sites_are_told_what_they_may(served: dict[str, Any]) -> None:
    answer = get(served, "/v1/models", Origin="https://a.example")
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    assert answer.headers["access-control-allow-credentials"] == "true"
    asked = served["client"].options(
        "/v1/models",
        headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"},
    )
    assert asked.headers["access-control-allow-methods"] == "GET"
    assert asked.headers["access-control-allow-headers"] == "x-ours"
    other = get(served, "/v1/models", Origin="https://b.example")
    assert "access-control-allow-origin" not in other.headers


def test_pages_redirect_to_where_a_proxy_has_mounted_them(served: dict[str, Any]) -> None:
    for page in ("/console/", "/account/password/"):
        answer = served["client"].get(page)
        assert answer.status_code == 302
        assert answer.headers["location"] == f"/quire/login/?next=/quire{page}"


def test_help_and_both_names_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    load_command_class("config", "serve").print_help("manage.py", "serve")
    for printed in (ran.stdout, capsys.readouterr().out):
        assert "[MODEL]" in printed
        assert "--prefill-context-parallel-size" not in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"api_key": ["sk-mine"]}, "An API key has 8 to 62 printable characters."),
        ({"lora_modules": ["a"]}, "--lora-modules takes NAME=PATH"),
        ({"vllm_enable_ssl_refresh": True}, "--enable-ssl-refresh can't be used"),
        ({"default_chat_template_kwargs": "{"}, "kwargs must be a JSON object: Expecting"),
        ({"default_chat_template_kwargs": "[]"}, "kwargs must be a JSON object; got '[]'."),
        ({"default_chat_template_kwargs": '{"tools": 1}'}, "can't hold 'tools'"),
        ({"middleware": ["nowhere.Class"]}, "--middleware nowhere.Class can't be imported"),
        ({"middleware": ["json.__name__"]}, "is no class and no function"),
        ({"root_path": "quire"}, "--root-path must begin"),
        ({"otlp_traces_endpoint": "there"}, "otlp_traces_endpoint must be an address"),
        ({"ssl_cert_reqs": 2}, "Clients' certificates need --ssl-certfile"),
        ({"allowed_origins": "[1]"}, "--allowed-origins must be a JSON list"),
        ({"model_tag": "a", "model": "b"}, "The model is given twice"),
        ({"decode_context_parallel_size": 2}, "a multiple of decode_context_parallel_size (2)"),
        ({"chat_template": "/nowhere.jinja"}, "chat_template '/nowhere.jinja' is no template"),
        ({"chat_template": "{% if %}"}, "chat_template: "),
        ({"reasoning_parser": "nobody"}, "There is no reasoning_parser 'nobody' here. There are: "),
        (
            {"reasoning_parser": "muse"},
            "vLLM's reasoning_parser 'muse' isn't here: Muse's channels",
        ),
        ({"tool_call_parser": "hf"}, "a checkpoint's response_template isn't read"),
        ({"tool_call_parser": "nobody"}, "There is no tool_call_parser 'nobody' here. There are: "),
        ({"io_processor_plugin": "nobody"}, "There is no IO processor 'nobody' here. "),
    ],
)
def test_what_cant_be_had_is_said_before_anything_starts(
    options: dict[str, Any], words: str, tmp_path: Path, settings: Any
) -> None:
    settings.DATA_DIR = tmp_path / "none"
    with pytest.raises(CommandError) as refusal:
        call_command("serve", **options)
    assert words in str(refusal.value)
    assert not any((tmp_path / "none").glob("*.sqlite3"))


def test_a_template_of_ones_own_reaches_gateways(tmp_path: Path) -> None:
    from catalog.cli import parse_engine_settings

    file = tmp_path / "ours.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    source = parse_engine_settings({"chat_template": str(file)})["chat_template"]
    assert source == file.read_text()
    assert parse_engine_settings({"chat_template": source})["chat_template"] == source
    assert json.dumps(source)
