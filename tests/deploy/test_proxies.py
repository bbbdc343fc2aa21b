"""The proxies' examples: streams aren't held back, sockets pass, and clients name no addresses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.conf import settings

from config.serve import KEEP_ALIVE_S

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
NGINX = (DEPLOY / "nginx.conf").read_text()
CADDY = (DEPLOY / "Caddyfile").read_text()


def nginx(name: str) -> str:
    """The value of a directive that is given once."""
    (value,) = re.findall(rf"^\s*{name}\s+(.*);$", NGINX, re.M)
    return value


def test_nginx_holds_back_neither_tokens_nor_files() -> None:
    assert nginx("proxy_buffering") == nginx("proxy_request_buffering") == "off"
    assert nginx("proxy_http_version") == "1.1"


def test_nginx_lets_sockets_pass() -> None:
    assert re.search(r"proxy_set_header Upgrade \$http_upgrade;", NGINX)
    assert re.search(r"proxy_set_header Connection \$connection_upgrade;", NGINX)


def test_nginx_sets_the_address_instead_of_passing_a_clients_on() -> None:
    assert re.search(r"proxy_set_header X-Forwarded-For \$remote_addr;", NGINX)
    assert re.search(r"proxy_set_header X-Forwarded-Proto \$scheme;", NGINX)
    assert "$proxy_add_x_forwarded_for" not in NGINX


def test_nginx_takes_the_largest_body_that_quire_does() -> None:
    max_bytes = int(nginx("client_max_body_size").removesuffix("m")) * 1024**2
    assert max_bytes > settings.QUIRE.max_file_bytes
    assert max_bytes > settings.QUIRE.max_body_bytes


@pytest.mark.parametrize("text", [NGINX, CADDY])
def test_braces_close_and_the_gateways_port_is_named(text: str) -> None:
    code = re.sub(r"#.*", "", text)
    assert code.count("{") == code.count("}")
    assert "127.0.0.1:8000" in code


def test_caddy_sends_tokens_as_they_come() -> None:
    assert re.search(r"flush_interval -1", CADDY)


def test_caddy_closes_idle_connections_before_the_gateway_does() -> None:
    (seconds,) = re.findall(r"keepalive (\d+)s", CADDY)
    assert int(seconds) < KEEP_ALIVE_S
