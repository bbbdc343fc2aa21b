"""Routes below `/console/requests/`."""

from django.urls import path

from console.views import requests

urlpatterns = [
    path("store/", requests.toggle_content_logging, name="store-prompts"),
    path("<str:name>/", requests.request_detail, name="request"),
]
