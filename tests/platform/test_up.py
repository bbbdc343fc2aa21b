"""`manage.py up` as its users meet it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from catalog.actions import load_model, unload_model
from catalog.checkpoint import default_name
from catalog.models import DesiredState, ServedModel
from config.up.banner import command
from config.up.first_run import VISION_DEMO, ensure_model, ensure_vision_demo
from config.up.processes import listen, url_of
from config.up.stack import InUse, exclusive
from tenants.actors import CLI_ACTOR
from tests.database import NAME, with_tables
from tests.platform.instance import (
    ROOT,
    Instance,
    certificate,
    environment,
    internal,
    manage,
    tiny_model_folder,
)
from tests.platform.test_processes import gone
from tests.waiting import wait_until

pytestmark = pytest.mark.system


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(scope="module")
def model(short_tmp: Path) -> str:
    return str(tiny_model_folder(short_tmp / "tiny"))


@pytest.fixture(scope="module")
def data_dir(short_tmp: Path) -> Path:
    return short_tmp / "up"


@pytest.fixture(scope="module")
def instance(data_dir: Path, model: str) -> Iterator[Instance]:
    """One instance for all tests of a running one; the last of them stops it."""
    with Instance(data_dir, "--model", model, "--served-model-name", "m") as up:
        up.ready()
        yield up


@pytest.fixture
def client(instance: Instance) -> Iterator[httpx.Client]:
    ready = instance.ready()
    headers = {"Authorization": f"Bearer {ready['api_key']}"}
    with httpx.Client(base_url=ready["url"], headers=headers, timeout=60) as client:
        yield client


def complete(client: httpx.Client) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "m", "prompt": "Hi", "max_tokens": 3})


def served(client: httpx.Client) -> bool:
    try:
        return complete(client).status_code == 200
    except httpx.HTTPError:
        return False


# -- a running instance -----------------------------------------------------------------------


def test_the_ready_file_is_private_and_says_all(instance: Instance) -> None:
    ready = instance.ready()
    assert mode(instance.ready_file) == 0o600
    assert set(ready) == {"url", "api_key", "model", "admin_url", "admin_user", "admin_password"}
    assert ready["model"] == "m"
    assert ready["admin_url"] == ready["url"] + "/admin/"
    assert all(ready.values())


def test_what_is_printed_can_be_pasted(instance: Instance) -> None:
    ready, text = instance.ready(), instance.text()
    for value in ready.values():
        assert value in text
    assert f"curl {ready['url']}/v1/chat/completions" in text
    body = re.search(r"-d '(.*)'", text)
    assert body
    assert json.loads(body.group(1))["model"] == "m"


def test_the_key_is_served_a_token(client: httpx.Client) -> None:
    answer = complete(client)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["m"]


def test_the_login_opens_the_admin_with_its_styles(instance: Instance) -> None:
    ready = instance.ready()
    with httpx.Client(base_url=ready["url"], follow_redirects=True, timeout=60) as browser:
        page = browser.get("/admin/")
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.text)
        assert token
        page = browser.post(
            str(page.url),
            data={
                "login": ready["admin_user"],
                "password": ready["admin_password"],
                "csrfmiddlewaretoken": token.group(1),
            },
        )
        assert "Raw data" in page.text
        style = re.search(r'href="(/styles/django-admin-[^"]*)"', page.text)
        assert style
        css = browser.get(style.group(1))
        assert (css.status_code, css.headers["content-type"].split(";")[0]) == (200, "text/css")


def test_usage_reaches_the_ledger(instance: Instance, client: httpx.Client) -> None:
    complete(client)
    asked = "SELECT count(*) FROM metering_usageentry WHERE model = 'm'"

    def rows() -> int:
        with closing(sqlite3.connect(instance.data_dir / NAME)) as database:
            return int(database.execute(asked).fetchone()[0])

    wait_until(lambda: rows() >= 2, "rows for the first token and for this one")


def test_other_commands_find_the_instance(instance: Instance) -> None:
    assert "1 ready" in manage(instance.data_dir, "list_models").stdout


def test_the_printed_chat_command_works_as_pasted(instance: Instance, tmp_path: Path) -> None:
    lines = instance.text().splitlines()
    line = lines[lines.index("  Chat in another terminal:") + 1]
    nowhere = environment(tmp_path / "unused")
    del nowhere["QUIRE_DATA_DIR"]  # another terminal knows nothing of this one
    process = subprocess.run(
        [*shlex.split(line), "Hello", "--max-tokens", "4"],
        cwd=ROOT,
        env=nowhere,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.strip()) > 0


def test_a_pasted_command_names_what_this_terminal_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    monkeypatch.chdir(ROOT)
    assert command("chat", ROOT / ".quire") == ".venv/bin/python manage.py chat"
    odd = tmp_path / "my data"
    assert command("chat", odd) == f".venv/bin/python manage.py chat --data-dir '{odd}'"
    monkeypatch.chdir(tmp_path)
    assert command("chat", ROOT / ".quire") == f"{ROOT}/.venv/bin/python {ROOT}/manage.py chat"


def test_a_second_instance_on_the_same_data_dir_is_refused(instance: Instance, model: str) -> None:
    done = manage(instance.data_dir, "up", "--port", "0", "--model", model, check=False)
    assert done.returncode == 1
    assert f"already (process {instance.process.pid})" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_foreign_host_name_is_refused(instance: Instance) -> None:
    answer = httpx.get(f"{instance.ready()['url']}/admin/", headers={"Host": "evil.example"})
    assert answer.status_code == 400


def test_another_gateway_may_join_speak_tls_and_turn_unready_before_it_ends(
    instance: Instance, client: httpx.Client, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path)
    cert, key = os.path.relpath(cert, tmp_path), os.path.relpath(key, tmp_path)
    command = [sys.executable, str(ROOT / "manage.py"), "gateway", "--port", "0"]
    joined = subprocess.Popen(
        [*command, "--ssl-certfile", cert, "--ssl-keyfile", key, "--root-path", "/q"],
        cwd=tmp_path,
        env=environment(instance.data_dir, QUIRE_SHUTDOWN_DELAY_SECONDS="3600"),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert joined.stderr is not None
        match = re.search(r"Serving at (https://127\.0\.0\.1:\d+);", joined.stderr.readline())
        assert match
        with httpx.Client(base_url=match[1], headers=client.headers, verify=False) as secure:
            wait_until(lambda: served(secure), "served over TLS")
            # Whether a proxy takes the root away, or there is none that does.
            listed = [secure.get(f"{root}/v1/models").json() for root in ("", "/q")]
            assert listed[0] == listed[1]
            assert secure.get("/q/login/").status_code == 200
            to_login = secure.get("/console/")
            assert to_login.headers["location"] == "/q/login/?next=/q/console/"
            assert "connection" not in secure.get("/ready").headers
            joined.terminate()
            wait_until(lambda: secure.get("/ready").status_code == 503, "unready")
            # Load balancers take a while to see that: requests are still answered.
            answer = secure.get("/v1/models")
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            assert joined.poll() is None
    finally:
        joined.terminate()  # the second signal
        joined.communicate()
    assert joined.returncode == 0


def test_killed_gateways_replicas_and_redis_come_back(
    instance: Instance, client: httpx.Client
) -> None:
    for word in ("config.serve", "tests.fakes.fake_replica", "redis-server"):
        pid = instance.child(word)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: gone(pid), f"{word} has ended")
        wait_until(lambda: served(client), f"served again after {word} was killed")


def test_sigterm_stops_all_and_leaves_true_rows(instance: Instance) -> None:
    """The last test of the running instance."""
    instance.ready()
    status, survivors = instance.end(signal.SIGTERM)
    assert (status, survivors) == (0, [])
    assert not (instance.data_dir / "instance.json").exists()
    listed = manage(instance.data_dir, "list_models").stdout
    assert "1 stopped" in listed
    assert "Traceback" not in instance.text(), re.findall(r".*Traceback.*", instance.text())


# -- the next start ---------------------------------------------------------------------------


def test_a_restart_keeps_its_secrets_and_a_kill_leaves_no_orphans(
    instance: Instance, data_dir: Path
) -> None:
    first = instance.ready()
    if instance.process.poll() is None:
        instance.end()
    assert mode(data_dir) == 0o700
    assert mode(data_dir / "credentials.json") == 0o600
    with Instance(data_dir, "--asgi-server", "daphne") as again:
        second = again.ready()
        names = ("api_key", "admin_user", "admin_password", "model")
        assert {n: second[n] for n in names} == {n: first[n] for n in names}
        headers = {"Authorization": f"Bearer {second['api_key']}"}
        with httpx.Client(base_url=second["url"], headers=headers, timeout=60) as client:
            assert served(client)
        status, survivors = again.end(signal.SIGKILL)
        assert status == -signal.SIGKILL
        assert survivors == []


def test_a_model_that_cannot_be_loaded_ends_the_start_with_its_reason(
    short_tmp: Path, model: str
) -> None:
    broken = internal(engine_command=[sys.executable, "-c", "raise SystemExit(3)"])
    with Instance(with_tables(short_tmp / "bad"), "--model", model, **broken) as up:
        assert up.process.wait(60) == 1
        assert "tiny can't be served: the replica exited with status 3" in up.text()
        assert "Traceback" not in up.text()
        assert up.family() == []
        assert not up.ready_file.exists()
    # The next start doesn't try it again.
    assert re.search(r"^tiny +unloaded", manage(short_tmp / "bad", "list_models").stdout, re.M)


@pytest.mark.django_db
def test_the_demo_that_sees_is_loaded_once(tmp_path: Path, settings: Any) -> None:
    folder = tiny_model_folder(tmp_path / "sees")
    settings.QUIRE = settings.QUIRE.replace(demo_vision_model=folder)
    rows = ServedModel.objects.filter(name=VISION_DEMO)
    ensure_vision_demo()
    assert rows.get().source == str(folder)
    assert rows.get().settings == {"device": "cpu"}
    unload_model(actor=CLI_ACTOR, model=rows.get())
    ensure_vision_demo()
    assert rows.get().desired_state == DesiredState.UNLOADED
    rows.delete()
    ensure_vision_demo()
    assert not rows.exists()


@pytest.mark.django_db
def test_a_name_that_is_in_use_keeps_the_demo_that_sees_out(tmp_path: Path, settings: Any) -> None:
    folder = tiny_model_folder(tmp_path / "sees")
    settings.QUIRE = settings.QUIRE.replace(demo_vision_model=folder)
    load_model(actor=CLI_ACTOR, name="tiny", source=str(folder), aliases=[VISION_DEMO])
    ensure_vision_demo()
    assert not ServedModel.objects.filter(name=VISION_DEMO).exists()


@pytest.mark.django_db
def test_a_model_that_cant_be_served_leaves_those_of_earlier_starts_loaded(tmp_path: Path) -> None:
    earlier = ensure_model(str(tiny_model_folder(tmp_path / "earlier")), [], {}).model
    start = ensure_model(str(tiny_model_folder(tmp_path / "bad")), [], {})
    assert start.unload_other_models() == "earlier"
    earlier.refresh_from_db()
    assert earlier.desired_state == "unloaded"
    start.undo()
    assert [(row.name, row.desired_state) for row in ServedModel.objects.order_by("pk")] == [
        ("earlier", "loaded"),
        ("bad", "unloaded"),
    ]


@pytest.mark.django_db
def test_a_model_that_could_be_served_before_is_wanted_as_before(tmp_path: Path) -> None:
    good = tiny_model_folder(tmp_path / "good")
    bad = tiny_model_folder(tmp_path / "bad")
    first = ensure_model(str(good), ["m"], {"max_model_len": 64})
    second = ensure_model(str(bad), ["m"], {"max_model_len": 32})
    assert (second.model.pk, second.model.source) == (first.model.pk, str(bad))
    second.undo()
    again = ServedModel.objects.get()
    assert (again.source, again.settings) == (str(good), {"max_model_len": 64})
    assert again.desired_state == "loaded"
    first.undo()
    again.refresh_from_db()
    assert again.desired_state == "unloaded"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", "70000"), "--port must be in [0, 65535]"),
        (("--workers", "0"), "--workers must be in [1, 64]"),
        (("--ssl-certfile", "x"), "go together"),
        (("--ready-file", "/no/such/folder/x"), "there is no folder /no/such/folder"),
        (("--max-num-seqs", "0"), "max_num_seqs must be in"),
        (("--model", "/no/such/model"), "There is no folder /no/such/model"),
    ],
)
def test_mistakes_end_the_start_with_one_clear_line(
    words: tuple[str, ...], message: str, short_tmp: Path, settings: object, monkeypatch: object
) -> None:
    from django.core.management import CommandError, call_command

    settings.DATA_DIR = short_tmp / "never"  # type: ignore[attr-defined]
    if words[0] == "--model":
        done = manage(short_tmp / "never", "up", "--port", "0", *words, check=False)
        assert message in done.stderr
        assert "Traceback" not in done.stderr
        return
    with pytest.raises(CommandError) as caught:
        call_command("up", "--port", "0", *words)
    assert message in str(caught.value)


# -- parts ------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_so_with_its_number() -> None:
    with listen("127.0.0.1", 0) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(OSError, match=rf"127\.0\.0\.1 port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_addresses_are_shown_as_a_browser_takes_them() -> None:
    assert url_of("0.0.0.0", 80, tls=False) == "http://127.0.0.1:80"
    assert url_of("::1", 8000, tls=True) == "https://[::1]:8000"
    assert url_of("::", 1, tls=False) == "http://[::1]:1"
    assert url_of("llm.local", 1, tls=False) == "http://llm.local:1"


def test_an_ipv6_address_can_be_listened_on() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = listen("::1", 0)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    listener.close()


def test_a_data_dir_has_one_holder_at_a_time(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(InUse, match=str(os.getpid())), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


def test_a_hub_id_is_its_models_name_and_a_folder_goes_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert default_name("facebook/opt-125m") == "facebook/opt-125m"
    assert default_name("models/tiny") == "tiny"
    assert default_name(str(tmp_path / "models" / "tiny")) == "tiny"
    assert default_name("models/tiny/") == "tiny"
    assert default_name("/models/none") == "none"
    for folder, name in (
        ("AI Models", "AI-Models"),
        ("Llama (2)", "Llama-2"),
        (".cache", "cache"),
        ("qwen_", "qwen"),
        ("模型", "model"),
    ):
        assert default_name(f"/models/{folder}") == name
        ServedModel._meta.get_field("name").run_validators(name)
