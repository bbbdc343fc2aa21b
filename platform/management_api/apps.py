"""The app of the management API."""

from django.apps import AppConfig


class ManagementApiConfig(AppConfig):
    """REST API for the console's functions. This app has no models."""

    name = "management_api"
    verbose_name = "Management API"
