"""Secrets that a product must hold are looked for in all that it writes, answers and shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from tests.console.oidc_provider import CLIENT, Provider
from tests.e2e.collector import Collector, collecting
from tests.e2e.mail_server import MailServer, receiving
from tests.e2e.product import ROOT, Product, running
from tests.services import missing
from tests.waiting import free_port, wait_until

#: What an operator sets. None is like anything that occurs by itself.
SECRET_VALUES = {
    name: f"{name}-never-shown-Zq7"
    for name in ("signing", "former", "metrics", "oidc", "smtp", "redis", "given-key", "collector")
}
PASSWORD = "a quiet page of ink"
#: Files of the data dir that hold secrets for their owner.
HOLDERS = ("quire.sqlite3", "credentials.json", "instance.json", "secret_key")


@contextmanager
def guarded_redis(folder: Path) -> Iterator[str]:
    """A Redis on a port, with a password."""
    program = shutil.which("redis-server") or missing("There is no redis-server")
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    log = (folder / "redis.log").open("wb")
    config = folder / "redis.conf"
    config.write_text(f"requirepass {SECRET_VALUES['redis']}\nmaxmemory-policy noeviction\n")
    process = subprocess.Popen(
        [command[0], str(config), *command[1:]], cwd=folder, stdout=log, stderr=log
    )
    url = f"redis://:{SECRET_VALUES['redis']}@127.0.0.1:{port}/0"
    try:
        wait_until(lambda: answers(url))
        yield url
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


@dataclass
class Walked:
    """A product in which everything happened, its secrets by name, and what it said."""

    product: Product
    secrets: dict[str, str]
    responses: dict[str, bytes]
    redis_url: str
    collector: Collector
    log: Path


@dataclass
class Client:
    """Asks, and keeps what it's answered."""

    url: str
    responses: dict[str, bytes] = field(default_factory=dict)
    session: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The answer; its body is kept under what was asked."""
        response = self.session.request(method, f"{self.url}{path}", **options)
        name = f"{method} {path} {len(self.responses)}"
        self.responses[name] = response.content
        return response

    def post(self, path: str, **values: str) -> httpx.Response:
        """A page's form."""
        page = self.session.get(f"{self.url}{path}", follow_redirects=True)
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)
        assert token, page.text
        return self.ask(
            "POST", urlsplit(str(page.url)).path, data={"csrfmiddlewaretoken": token[1], **values}
        )


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walked]:
    """Invitation, new password, log-in, keys, errors, crashes, and looks at all that shows."""
    folder, provider = tmp_path_factory.mktemp("secrets"), Provider()
    with receiving() as mail, guarded_redis(folder) as url, collecting() as collector:
        endpoint = urlsplit(collector.url)._replace(
            netloc=f"someone:{SECRET_VALUES['collector']}@{urlsplit(collector.url).netloc}"
        )
        environment = {
            "QUIRE_SECRET_KEY": SECRET_VALUES["signing"] * 3,
            "QUIRE_SECRET_KEY_FALLBACKS": SECRET_VALUES["former"] * 3,
            "QUIRE_METRICS_TOKEN": SECRET_VALUES["metrics"],
            "QUIRE_API_KEYS": SECRET_VALUES["given-key"],
            "QUIRE_OIDC_ISSUER": provider.url,
            "QUIRE_OIDC_CLIENT_ID": CLIENT,
            "QUIRE_OIDC_CLIENT_SECRET": SECRET_VALUES["oidc"],
            "QUIRE_SMTP_URL": f"smtp://quire:{SECRET_VALUES['smtp']}@127.0.0.1:{mail.port}",
            "QUIRE_MAIL_FROM": "quire@mail.example",
            "QUIRE_OTLP_TRACES_ENDPOINT": endpoint.geturl(),
            "QUIRE_LOG_STYLE": "json",
            "QUIRE_LOG_LEVEL": "DEBUG",
            "REDIS_URL": url,
        }
        with running(folder, **environment) as product:
            os.environ.update(environment)
            try:
                walk = Walked(product, dict(SECRET_VALUES), {}, url, collector, folder / "up.log")
                go(walk, mail)
                yield walk
            finally:
                for name in environment:
                    del os.environ[name]
    provider.close()


#: In one process: each of its own would take a second to start.
COMMANDS = """
import contextlib, io, json
from django.core.management import call_command
printed = []
for command in json.loads(COMMANDS):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        call_command(*command)
    printed.append(output.getvalue())
print(json.dumps(printed))
"""


def manage_all(product: Product, *commands: tuple[str, ...]) -> list[str]:
    """What commands on this instance's data print."""
    script = COMMANDS.replace("COMMANDS", repr(json.dumps(commands)))
    return json.loads(product.manage("shell", "--no-imports", "-c", script))


def go(walk: Walked, mail: MailServer) -> None:
    product, secrets = walk.product, walk.secrets
    client = Client(product.url, walk.responses)
    created = manage_all(
        product,
        ("create_tenant", "northwind"),
        ("invite", "mia@mail.example", "--tenant", "northwind", "--url", product.url),
        ("create_key", "--tenant", "northwind", "--name", "mine"),
        ("set_webhook", "--tenant", "northwind", "https://a.example/"),
        ("create_key", "--tenant", "default", "--name", "root", "--scopes", "operator"),
    )
    link = created[1].split()[0]
    secrets["invitation"] = link.rstrip("/").rpartition("/")[2]
    invitation = urlsplit(link).path
    for path in (invitation, invitation[:-1], invitation.upper(), f"{invitation}x/"):
        client.ask("GET", path)
    assert client.ask("POST", invitation, data={}).status_code == 403
    joined = client.post(invitation, username="mia", password=PASSWORD)
    assert joined.status_code == 302, joined.text
    client.ask("GET", invitation)
    client.session.cookies.clear()
    client.post("/account/password/reset/", email="mia@mail.example")
    text = mail.mail_to("mia@mail.example", "/password/reset/key/")
    reset = re.search(r"http\S+/account/password/reset/key/\S+", text)
    assert reset
    key = urlsplit(reset[0]).path
    secrets["reset"] = key.rstrip("/").rpartition("-")[2]
    for path in (key, key[:-1], f"{key}x/"):
        client.ask("GET", path)
    assert client.ask("POST", key, data={}).status_code == 403
    client.session.cookies.clear()
    client.post("/login/", login="mia", password="not hers: Zq7-wrong")
    secrets["wrong password"] = "not hers: Zq7-wrong"
    assert client.post("/login/", login="mia", password=PASSWORD).status_code == 302
    secrets["password"] = PASSWORD
    for path in ("/console/", "/no/such/page"):
        client.ask("GET", path)
    for name, pattern, printed in (
        ("API key", r"sk-quire-\w{53}", created[2]),
        ("webhook", r"\b[0-9a-f]{64}\b", created[3]),
        ("operator's key", r"sk-quire-\w{53}", created[4]),
    ):
        match = re.search(pattern, printed)
        assert match, name
        secrets[name] = match[0]
    secrets["first key"] = product.api_key
    with sqlite3.connect(product.data_dir / "quire.sqlite3") as database:
        salts = database.execute("SELECT slug, salt FROM tenants_tenant").fetchall()
    secrets |= {f"salt of {slug}": salt for slug, salt in salts}
    walk.secrets = secrets
    api(client, walk)
    operator(client, walk)


def api(client: Client, walk: Walked) -> None:
    """Keys that are right, wrong, and where none belongs."""
    secrets = walk.secrets
    for key in (secrets["API key"], secrets["given-key"], secrets["API key"][:-1] + "0"):
        headers = {"Authorization": f"Bearer {key}"}
        chat = {"model": walk.product.model, "messages": [{"role": "user", "content": "Hi"}]}
        client.ask("GET", "/v1/models", headers={"x-api-key": key})
        client.ask("POST", "/v1/chat/completions", headers=headers, json=chat | {"max_tokens": 3})
        client.ask("GET", "/v1/no/such", headers=headers)
        client.ask("GET", f"/v1/models?api_key={key}")
        client.ask("POST", "/v1/completions", headers=headers, content=b"{")


def operator(client: Client, walk: Walked) -> None:
    """What operators look at; then a gateway and a replica crash."""
    product = walk.product
    for headers in (
        {"Authorization": "Bearer " + walk.secrets["operator's key"]},
        {"Authorization": f"Bearer {SECRET_VALUES['metrics']}"},
    ):
        for path in ("/server_info", "/health", "/metrics", "/load", "/openapi.json"):
            client.ask("GET", path, headers=headers)
        for path in ("settings", "tenants", "tenants/northwind/audit", "tenants/northwind/keys"):
            client.ask("GET", f"/api/{path}/", headers=headers)
    commands = ("status", "list_settings", "list_tenants", "list_keys", "list_models")
    for command, printed in zip(commands, manage_all(product, *zip(commands)), strict=True):
        walk.responses[command] = printed.encode()
    lines = [(pid, line) for pid, line in command_lines()]
    walk.responses["command lines"] = b"\n".join(line for _, line in lines)
    for module in (b"config.serve", b"engine.serving"):
        ours = [pid for pid, line in lines if module in line and is_below(pid, product.process.pid)]
        assert ours, module
        os.kill(ours[0], signal.SIGABRT)
        wait_until(lambda ours=ours: not Path(f"/proc/{ours[0]}").exists())
    wait_until(lambda: pings(f"{product.url}/ping"))


def pings(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False  # the connection was the killed gateway's


def command_lines() -> Iterator[tuple[int, bytes]]:
    """Of all processes, as anybody on the machine may read them."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            yield int(entry.name), (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended


def is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == ancestor


def values_in_redis(url: str) -> dict[str, bytes]:
    """All keys with all that they hold."""
    keys: dict[str, bytes] = {}
    with redis.Redis.from_url(url) as client:
        readers: dict[bytes, Any] = {
            b"string": client.get,
            b"hash": client.hgetall,
            b"list": lambda key: client.lrange(key, 0, -1),
            b"set": client.smembers,
            b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
            b"stream": client.xrange,
        }
        for key in client.scan_iter(count=1000):
            kind: Any = client.type(key)
            if kind != b"none":  # it has ended meanwhile
                keys[key.decode()] = key + repr(readers[kind](key)).encode()
    return keys


def leaks(secrets: dict[str, str], texts: dict[str, bytes]) -> list[str]:
    """Which secret is in which text."""
    return sorted(
        f"{name}: {source}"
        for name, secret in secrets.items()
        for source, text in texts.items()
        if secret.encode() in text
    )


def test_fault_73_no_secret_is_in_a_log_line(walked: Walked) -> None:
    text = walked.log.read_bytes()
    paths = {json.loads(line).get("path", "") for line in text.splitlines() if line[:1] == b"{"}
    assert {"/invitation/***/", "/account/password/reset/key/***/"} <= paths
    visible_lines = text.splitlines()
    # `up` tells its owner the first key and the password, at the end of the start.
    lines = {f"line {n}": line for n, line in enumerate(visible_lines) if line[:1] == b"{"}
    assert leaks(walked.secrets, lines) == []


def test_fault_73_no_secret_is_in_a_span(walked: Walked) -> None:
    walked.collector.wait(lambda spans: any("completions" in span.name for span in spans))
    walked.collector.wait(
        lambda spans: any("***" in str(span.attributes.get("url.path")) for span in spans)
    )
    assert leaks(walked.secrets, {"spans": bytes(walked.collector.raw)}) == []


def test_fault_73_no_secret_is_in_redis_or_in_a_file_that_neednt_hold_it(walked: Walked) -> None:
    assert leaks(walked.secrets, values_in_redis(walked.redis_url)) == []
    files = {
        str(path): path.read_bytes()
        for path in walked.product.data_dir.rglob("*")
        if path.is_file() and not path.name.startswith(HOLDERS)
    }
    assert leaks(walked.secrets, files) == []


def test_fault_73_no_secret_is_in_an_answer_a_command_or_a_process_list(walked: Walked) -> None:
    public = {"invitation"}  # its page's own address, for who follows it
    texts = {
        name: text
        for name, text in walked.responses.items()
        if walked.secrets["invitation"] not in name and walked.secrets["reset"] not in name
    }
    assert {"status", "list_settings", "command lines"} <= set(texts)
    assert leaks(walked.secrets, texts) == []
    pages = {name: text for name, text in walked.responses.items() if name not in texts}
    other_values = {name: value for name, value in walked.secrets.items() if name not in public}
    assert leaks(other_values, pages) == []


def test_fault_73_no_secret_is_in_the_repr_of_what_holds_it(walked: Walked) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPRS],
        cwd=ROOT,
        env={**os.environ, "QUIRE_DATA_DIR": str(walked.product.data_dir)},
        capture_output=True,
        check=True,
    )
    assert done.stdout.count(b"\n") > 20
    assert leaks(walked.secrets, {"repr": done.stdout}) == []


REPRS = """
import os, sys
sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "platform")]
os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
import django
django.setup()
from django.apps import apps
from django.conf import settings
from django.views.debug import get_default_exception_reporter_filter
from config.up.first_run import Credentials
print(repr(settings))
print(repr(settings.QUIRE), settings.QUIRE)
print(repr(Credentials.read(settings.DATA_DIR)))
# What Django's page of a fault shows with QUIRE_DEBUG.
print(get_default_exception_reporter_filter().get_safe_settings())
for model in apps.get_models():
    for row in model._default_manager.all()[:50]:
        print(repr(row), row)
"""
