"""The data plane's URLs. `inference.asgi` serves the same paths without Django's middleware."""

from django.urls import path, re_path

from inference.extras.tokenize import DetokenizeView, TokenizeView
from inference.health import HealthView, PingView
from inference.openai.chat import ChatCompletionsView
from inference.openai.completions import CompletionsView
from inference.openai.models import ModelsView, ModelView
from inference.ops import MetricsView, VersionView
from inference.web.views import NotFoundView

urlpatterns = [
    path("v1/models", ModelsView.as_view()),
    path("v1/models/<path:model>", ModelView.as_view()),
    path("v1/chat/completions", ChatCompletionsView.as_view()),
    path("v1/completions", CompletionsView.as_view()),
    path("tokenize", TokenizeView.as_view()),
    path("detokenize", DetokenizeView.as_view()),
    path("health", HealthView.as_view()),
    path("ping", PingView.as_view()),
    path("version", VersionView.as_view()),
    path("metrics", MetricsView.as_view()),
    re_path(r"^v1(?:/.*)?$", NotFoundView.as_view()),
]
