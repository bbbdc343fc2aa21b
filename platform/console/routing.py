"""WebSocket routes of the pages, for `config.asgi`."""

from django.urls import path

from console.live.consumer import ConsoleConsumer

#: `static/console/js/live/` connects to these.
SOCKET_PATH = "/ws/console/"

websocket_urlpatterns = [path(SOCKET_PATH.lstrip("/"), ConsoleConsumer.as_asgi())]
