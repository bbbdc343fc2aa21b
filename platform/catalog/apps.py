"""The app of what is served: models and their replicas."""

from django.apps import AppConfig


class CatalogConfig(AppConfig):
    """Served models and replicas."""

    name = "catalog"
    verbose_name = "Models and replicas"

    def ready(self) -> None:
        """A tenant that is erased leaves the models that it could use."""
        from catalog.models import ServedModel
        from tenants.holdings import Holding, register

        links = ServedModel.tenants.through._default_manager
        register(Holding("models", erase=lambda tenant: links.filter(tenant=tenant).delete()[0]))
