"""Four ways to serve the same trivial chat answer, for `compare_views`.

KIND=adrf: adrf's APIView under Django's handler. KIND=adrf-middleware: the same with six of the
usual middlewares. KIND=awaited: an APIView whose policies are awaited in place, under Django's
handler. KIND=lean: the same under a handler without request signals and threads, as
`inference.edge.handler` has. KIND=raw: no framework, to see what the server itself costs.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import django
import msgspec
import pydantic
from django.conf import settings

KIND = os.environ.get("KIND", "lean")
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
settings.configure(
    SECRET_KEY="x",
    ALLOWED_HOSTS=["*"],
    ROOT_URLCONF=__name__,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "rest_framework"],
    MIDDLEWARE=MIDDLEWARE if KIND == "adrf-middleware" else [],
    REST_FRAMEWORK={"UNAUTHENTICATED_USER": None},
)
django.setup()

from adrf.views import APIView as AdrfView  # noqa: E402
from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse  # noqa: E402
from django.urls import path  # noqa: E402
from rest_framework.authentication import BaseAuthentication  # noqa: E402
from rest_framework.permissions import BasePermission  # noqa: E402
from rest_framework.renderers import JSONRenderer  # noqa: E402
from rest_framework.response import Response  # noqa: E402
from rest_framework.views import APIView  # noqa: E402

WORDS = 16
ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "word " * WORDS},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": WORDS, "total_tokens": WORDS + 1},
}
CHUNK = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'


class Message(pydantic.BaseModel):
    role: str
    content: str


class Body(pydantic.BaseModel):
    model: str
    messages: list[Message]
    stream: bool = False


class Key(BaseAuthentication):
    def authenticate(self, request: Any) -> tuple[Any, Any] | None:
        return ("somebody", None) if request.META.get("HTTP_AUTHORIZATION") else None


class Anyone(BasePermission):
    def has_permission(self, request: Any, view: Any) -> bool:
        return True


async def events() -> AsyncIterator[bytes]:
    for _ in range(WORDS):
        await asyncio.sleep(0)
        yield CHUNK
    yield b"data: [DONE]\n\n"


class Adrf(AdrfView):
    authentication_classes = (Key,)
    permission_classes = (Anyone,)
    renderer_classes = (JSONRenderer,)

    async def post(self, request: Any) -> Any:
        if Body.model_validate(request.data).stream:
            return StreamingHttpResponse(events(), content_type="text/event-stream")
        return Response(ANSWER)


class Awaited(APIView):
    authentication_classes = (Key,)
    permission_classes = (Anyone,)

    async def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        for authenticator in self.get_authenticators():
            authenticator.authenticate(request)
        for permission in self.get_permissions():
            permission.has_permission(request, self)
        return await self.post(request)

    async def post(self, request: HttpRequest) -> Any:
        if Body.model_validate(json.loads(request.body)).stream:
            return StreamingHttpResponse(events(), content_type="text/event-stream")
        return HttpResponse(msgspec.json.encode(ANSWER), content_type="application/json")


view = Adrf if KIND.startswith("adrf") else Awaited
urlpatterns = [path("v1/chat/completions", view.as_view())]


class LeanHandler(ASGIHandler):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        request, _ = self.create_request(scope, io.BytesIO(message.get("body", b"")))
        watch = asyncio.ensure_future(receive())
        await self.send_response(await self.get_response_async(request), send)
        watch.cancel()


async def raw(scope: Any, receive: Any, send: Any) -> None:
    body = Body.model_validate(json.loads((await receive())["body"]))
    kind = b"text/event-stream" if body.stream else b"application/json"
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if body.stream:
        async for chunk in events():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})
    else:
        await send({"type": "http.response.body", "body": msgspec.json.encode(ANSWER)})


application: Any = raw if KIND == "raw" else (LeanHandler if KIND == "lean" else ASGIHandler)()
