"""What lies below the page of requests."""

from django.urls import path

from console import requests

urlpatterns = [
    path("store/", requests.store, name="store-prompts"),
    path("<str:name>/", requests.one, name="request"),
]
