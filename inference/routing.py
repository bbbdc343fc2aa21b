"""WebSocket routes of the data plane, for `config.asgi`."""

from django.urls import path

from inference.api.audio.realtime import RealtimeConsumer
from inference.playground import PlaygroundConsumer

websocket_urlpatterns = [
    path("ws/playground/", PlaygroundConsumer.as_asgi()),
    path("v1/realtime", RealtimeConsumer.as_asgi()),
]
