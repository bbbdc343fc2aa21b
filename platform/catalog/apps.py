"""The catalog app: served models and their replicas."""

from django.apps import AppConfig


class CatalogConfig(AppConfig):
    """Served models and replicas."""

    name = "catalog"
    verbose_name = "Models and replicas"

    def ready(self) -> None:
        """Register the models shared with a tenant, which stay when the tenant is erased."""
        from catalog.access import access_served_models
        from catalog.models import McpServer, ServedModel
        from tenants.access import register_name_source
        from tenants.tenant_data import TenantDataKind, register_data_kind

        links = ServedModel.tenants.through._default_manager
        mcp_links = McpServer.tenants.through._default_manager
        register_name_source(
            lambda tenant: (
                name
                for name_of_model, aliases in access_served_models(tenant).values_list(
                    "name", "aliases"
                )
                for name in (name_of_model, *aliases)
            )
        )
        register_data_kind(
            TenantDataKind("models", erase=lambda tenant: links.filter(tenant=tenant).delete()[0])
        )
        register_data_kind(
            TenantDataKind(
                "mcp servers", erase=lambda tenant: mcp_links.filter(tenant=tenant).delete()[0]
            )
        )
