"""The app of what is served: models and their replicas."""

from django.apps import AppConfig


class CatalogConfig(AppConfig):
    """Served models and replicas."""

    name = "catalog"
    verbose_name = "Models and replicas"
