"""What lies below the page of requests."""

from django.urls import path

from console.views import requests

urlpatterns = [
    path("store/", requests.store, name="store-prompts"),
    path("<str:name>/", requests.one, name="request"),
]
