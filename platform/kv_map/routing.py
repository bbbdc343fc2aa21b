"""The KV map's WebSocket route, for `config.asgi`."""

from django.urls import path

from kv_map.consumer import KvConsumer

SOCKET_PATH = "/ws/kv/"

websocket_urlpatterns = [path(SOCKET_PATH.lstrip("/"), KvConsumer.as_asgi())]
