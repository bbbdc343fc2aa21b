"""An identity provider in a process's own thread: OpenID Connect with signed tokens and PKCE.

It asks nobody anything: whoever comes to its authorization page is `person`, as the test set it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT, SECRET = "quire", "a secret of the client's"
KEY_ID = "k1"


class Provider:
    """Runs until `close`. `person`: the claims of whoever comes, `sub` among them."""

    def __init__(self) -> None:
        self.person: dict[str, Any] = {"sub": "1"}
        self.key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.codes: dict[str, dict[str, Any]] = {}
        self.tokens: dict[str, dict[str, Any]] = {}
        #: Whether sign-ins come with a refresh token; token -> claims as they are today.
        self.offline = False
        self.refreshes: dict[str, dict[str, Any]] = {}
        self.asked = 0
        #: Other addresses in its document; where asking for the person's data leads.
        self.elsewhere: dict[str, str] = {}
        self.redirect = ""
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider._get(self)

            def do_POST(self) -> None:
                provider._post(self)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()

    def _get(self, handler: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(handler.path)
        if parts.path == "/.well-known/openid-configuration":
            names = {"authorization_endpoint": "authorize", "token_endpoint": "token"}
            names |= {"userinfo_endpoint": "userinfo", "jwks_uri": "jwks"}
            endpoints = {name: f"{self.url}/{path}" for name, path in names.items()}
            methods = ["client_secret_post"]
            _json(
                handler,
                {
                    **endpoints,
                    "issuer": self.url,
                    "token_endpoint_auth_methods_supported": methods,
                    "code_challenge_methods_supported": ["S256"],
                    **self.elsewhere,
                },
            )
        elif parts.path == "/jwks":
            public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
            _json(handler, {"keys": [{**public, "kid": KEY_ID, "use": "sig", "alg": "RS256"}]})
        elif parts.path == "/authorize":
            asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
            code = secrets.token_urlsafe(16)
            self.codes[code] = {**asked, "person": dict(self.person)}
            back = urlencode({"code": code, "state": asked["state"]})
            handler.send_response(302)
            handler.send_header("Location", f"{asked['redirect_uri']}?{back}")
            handler.end_headers()
        elif parts.path == "/userinfo" and self.redirect and not parts.query:
            handler.send_response(302)
            handler.send_header("Location", self.redirect)
            handler.end_headers()
        elif parts.path == "/userinfo":
            token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
            person = self.tokens.get(token)
            _json(handler, person or {}, 200 if person else 401)
        else:
            _json(handler, {}, 404)

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length", 0))
        form = {k: v[0] for k, v in parse_qs(handler.rfile.read(length).decode()).items()}
        if form.get("grant_type") == "refresh_token":
            self.asked += 1
            person = self.refreshes.pop(form["refresh_token"], None)
            is_registered = (form.get("client_id"), form.get("client_secret")) == (CLIENT, SECRET)
            if person is None or not is_registered:
                _json(handler, {"error": "invalid_grant"}, 400)
            else:
                self._give(handler, person)
            return
        asked = self.codes.pop(form.get("code", ""), None)
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        right = (
            asked is not None
            and (form.get("client_id"), form.get("client_secret")) == (CLIENT, SECRET)
            and asked["redirect_uri"] == form.get("redirect_uri")
            and asked.get("code_challenge") == challenge
        )
        if asked is None or not right:
            _json(handler, {"error": "invalid_grant"}, 400)
            return
        self._give(handler, asked["person"])

    def _give(self, handler: BaseHTTPRequestHandler, person: dict[str, Any]) -> None:
        access = secrets.token_urlsafe(16)
        self.tokens[access] = person
        now = int(time.time())
        claims = {**person, "iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 60}
        token = jwt.encode(claims, self.key, algorithm="RS256", headers={"kid": KEY_ID})
        grant = {"access_token": access, "token_type": "Bearer", "id_token": token}
        if self.offline:  # a new one each time
            grant["refresh_token"] = secrets.token_urlsafe(16)
            self.refreshes[grant["refresh_token"]] = person
        _json(handler, grant)


def _json(handler: BaseHTTPRequestHandler, value: Any, status: int = 200) -> None:
    body = json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
