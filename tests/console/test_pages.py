"""Who may see the pages, and what every page carries."""

from __future__ import annotations

import pytest
from django.test import Client

from tests.console.conftest import Login
from tests.console.markup import foreign_addresses, inline_code
from tests.console.seed import PASSWORD

#: Every page of people who are logged in.
PAGES = [
    *("/", "/console/", "/console/keys/", "/console/members/", "/console/audit/"),
    *("/console/usage/", "/console/budgets/", "/console/prices/", "/console/webhook/"),
    *("/console/fairness/", "/console/tenants/acme/"),
    *("/console/models/", "/console/batches/", "/console/files/"),
    *("/console/data/", "/account/password/", "/account/2fa/", "/account/sessions/"),
]


@pytest.mark.parametrize("path", PAGES)
def test_anonymous_is_sent_to_the_login_page(client: Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 302
    assert response["Location"] == f"/login/?next={path}"


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("name", ["ada", "root"])
def test_pages_have_no_inline_code_and_load_nothing_from_elsewhere(
    login: Login, path: str, name: str
) -> None:
    response = login(name).get(path)
    assert response.status_code == 200
    html = response.content.decode()
    assert inline_code(html) == []
    assert foreign_addresses(html) == []


@pytest.mark.parametrize("path", [*PAGES, "/login/", "/admin/", "/no/such/page"])
def test_every_page_has_the_policy(login: Login, path: str) -> None:
    client = Client() if path == "/login/" else login("root")
    policy = client.get(path, headers={"accept": "text/html"})["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "connect-src 'self' ws://testserver" in policy


def test_the_reference_has_the_bar_of_whoever_looks(login: Login) -> None:
    assert "Log out" in login("ada").get("/reference/").content.decode()
    anonymous = Client().get("/reference/")
    assert anonymous.status_code == 200
    assert "Log out" not in anonymous.content.decode()


def test_the_console_forbids_markup_from_strings_and_the_admin_does_not(login: Login) -> None:
    client = login("root")
    assert "require-trusted-types-for" in client.get("/")["Content-Security-Policy"]
    assert "require-trusted-types-for" not in client.get("/admin/")["Content-Security-Policy"]


def test_json_gets_no_page_policy(login: Login) -> None:
    assert "Content-Security-Policy" not in login("ada").get("/console/api/usage")


def test_secure_requests_name_the_secure_websocket(rows: None, client: Client) -> None:
    policy = client.get("/login/", secure=True)["Content-Security-Policy"]
    assert "wss://testserver" in policy


@pytest.mark.parametrize("path", PAGES)
def test_pages_behind_the_login_are_not_kept_by_caches(login: Login, path: str) -> None:
    assert "no-store" in login("ada").get(path)["Cache-Control"]


def test_only_staff_is_led_to_the_admin(login: Login) -> None:
    assert "/admin/" in login("root").get("/").content.decode()
    assert "/admin/" not in login("ada").get("/").content.decode()


def test_login_leads_to_the_page_that_was_asked_for(rows: None, client: Client) -> None:
    form = {"login": "ada", "password": PASSWORD, "next": "/console/"}
    response = client.post("/login/?next=/console/", form)
    assert response["Location"] == "/console/"


def test_login_does_not_lead_to_other_servers(rows: None, client: Client) -> None:
    form = {"login": "ada", "password": PASSWORD, "next": "https://evil.example/"}
    assert client.post("/login/", form)["Location"] == "/"


def test_a_wrong_password_is_told_without_saying_whether_the_user_exists(
    rows: None, client: Client
) -> None:
    for name in ("ada", "no-such-user"):
        response = client.post("/login/", {"login": name, "password": "wrong"})
        assert response.status_code == 200
        assert "password you specified are not correct" in response.content.decode()


def try_password(
    client: Client, name: str, password: str, path: str = "/login/", **more: str
) -> int:
    return client.post(path, {"login": name, "password": password}, **more).status_code


def test_guessing_passwords_is_stopped_even_for_the_right_one(rows: None, client: Client) -> None:
    for attempt in range(10):
        assert try_password(client, "ada", f"guess {attempt}") == 200
    locked = client.post("/login/", {"login": "ada", "password": PASSWORD})
    assert locked.status_code == 200
    assert "Too many wrong passwords" in locked.content.decode()


def test_guessing_locks_out_nobody_else(rows: None, client: Client) -> None:
    for attempt in range(11):
        try_password(client, "ada", f"guess {attempt}")
    assert try_password(client, "root", PASSWORD) == 302
    assert try_password(Client(), "ada", PASSWORD, REMOTE_ADDR="192.0.2.7") == 302


def test_an_address_that_tries_many_names_is_stopped_within_fifty(
    rows: None, client: Client
) -> None:
    for number in range(45):
        try_password(client, f"name-{number}", "guess")
    locked = client.post("/login/", {"login": "ada", "password": PASSWORD}).content.decode()
    assert "Too many wrong passwords" in locked
    assert try_password(Client(), "ada", PASSWORD, REMOTE_ADDR="192.0.2.7") == 302


def test_right_passwords_count_for_nothing(rows: None) -> None:
    for _ in range(12):
        assert try_password(Client(), "ada", PASSWORD) == 302
    assert try_password(Client(), "ada", "wrong") == 200
    assert try_password(Client(), "ada", PASSWORD) == 302


def test_the_admin_sends_to_the_one_login(rows: None, login: Login) -> None:
    answer = Client().get("/admin/", follow=True)
    assert answer.redirect_chain[-1][0] == "/login/?next=/admin/"
    assert (
        Client().post("/admin/login/", {"username": "root", "password": PASSWORD}).status_code
        == 302
    )
    assert login("ada").get("/admin/login/").status_code == 403
    assert login("root").get("/admin/password_change/")["Location"] == "/account/password/"


def test_logging_out_takes_a_post(login: Login) -> None:
    client = login("ada")
    assert client.get("/logout/").status_code == 200
    assert client.get("/").status_code == 200
    assert client.post("/logout/")["Location"] == "/login/"
    assert client.get("/").status_code == 302


def test_a_user_changes_their_password(login: Login) -> None:
    client = login("ada")
    new = "another quiet page"
    form = {"oldpassword": PASSWORD, "password1": new, "password2": new}
    assert client.post("/account/password/", form).status_code == 302
    assert client.get("/").status_code == 200
    form = {"login": "ada", "password": new}
    assert Client().post("/login/", form)["Location"] == "/"


@pytest.mark.parametrize("path", ["/", "/console/"])
def test_pages_are_read_only(login: Login, path: str) -> None:
    assert login("ada").post(path).status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        *("", "requests/", "fairness/", "adapters/", "batches/", "files/", "usage/", "budgets/"),
        *("members/", "keys/", "audit/", "webhook/", "data/"),
    ],
)
def test_who_belongs_to_no_tenant_is_told_so_and_nothing_is_called_a_mistake(
    login: Login, path: str
) -> None:
    page = login("nobody").get(f"/console/{path}")
    text = page.content.decode()
    assert page.status_code == 200
    assert "<h2>You belong to no tenant yet</h2>" in text
    assert 'class="notice error"' not in text
    assert "?all=yes" not in text


def test_a_wrong_range_is_no_lack_of_a_tenant(login: Login) -> None:
    page = login("ada").get("/console/?range=never")
    assert page.status_code == 400
    assert "range must be one of" in page.content.decode()
    assert "You belong to no tenant" not in page.content.decode()
