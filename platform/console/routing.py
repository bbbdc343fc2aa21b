"""WebSocket routes of the pages, for `config.asgi`."""

from django.urls import path

from console.live.consumer import ConsoleConsumer
from kv_map.consumer import KvConsumer

#: Where `static/console/js/live/` connects to.
SOCKET_PATH = "/ws/console/"

websocket_urlpatterns = [
    path("ws/kv/", KvConsumer.as_asgi()),
    path(SOCKET_PATH.lstrip("/"), ConsoleConsumer.as_asgi()),
]
