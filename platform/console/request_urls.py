"""Routes below `/console/requests/`."""

from django.urls import path

from console.views import requests

urlpatterns = [
    path("store/", requests.toggle_content_logging, name="store-prompts"),
    path("views/save/", requests.save_view, name="save-view"),
    path("views/<int:pk>/delete/", requests.delete_view, name="delete-view"),
    path("<str:name>/", requests.request_detail, name="request"),
]
