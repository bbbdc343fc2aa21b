"""REST for what the console does."""

from django.apps import AppConfig


class ManagementApiConfig(AppConfig):
    """REST for what the console does: no models."""

    name = "management_api"
    verbose_name = "Management API"
