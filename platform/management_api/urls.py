"""Routes below `/api/`."""

from django.urls import path
from rest_framework.routers import SimpleRouter

from kv_map import views as inside
from management_api import adapters, tenants
from management_api import billing as money
from management_api import observability as overview
from management_api import observability as requests
from management_api import observability as settings
from management_api import people as views
from management_api import schema as document  # noqa: F401 - registers by being imported
from management_api import served_models as models
from management_api import tenants as webhooks
from management_api.schema import Document

TENANT = r"tenants/(?P<tenant>[a-z0-9-]{1,63})"

router = SimpleRouter()
router.register("users", views.Users, "api-users")
router.register("audit", views.InstallationAudit, "api-installation-audit")
router.register("settings", settings.Settings, "api-settings")
router.register("models", models.Models, "api-models")
router.register("tenants", tenants.Tenants, "api-tenants")
router.register(f"{TENANT}/members", views.Members, "api-members")
router.register(f"{TENANT}/invitations", views.Invitations, "api-invitations")
router.register(f"{TENANT}/service-accounts", views.ServiceAccounts, "api-service-accounts")
router.register(f"{TENANT}/keys", views.Keys, "api-keys")
router.register("blocks", inside.Blocks, "api-blocks")
router.register("isolation", inside.Isolation, "api-isolation")
router.register("overview", overview.Overview, "api-overview")
router.register("history", overview.History, "api-history")
router.register("fairness", overview.Fairness, "api-fairness")
router.register("requests", requests.Requests, "api-all-requests")
router.register("prices", money.Prices, "api-prices")
router.register(f"{TENANT}/budgets", money.Budgets, "api-budgets")
router.register(f"{TENANT}/webhooks", webhooks.Webhooks, "api-webhooks")
router.register(f"{TENANT}/webhook-deliveries", webhooks.Deliveries, "api-deliveries")
router.register(f"{TENANT}/audit", views.Audit, "api-audit")
router.register("adapters/uploads", adapters.SharedUploads, "api-shared-uploads")
router.register("adapters", adapters.SharedAdapters, "api-shared-adapters")
router.register(f"{TENANT}/adapters/uploads", adapters.AdapterUploads, "api-uploads")
router.register(f"{TENANT}/adapters", adapters.Adapters, "api-adapters")
router.register(f"{TENANT}/requests", adapters.Requests, "api-requests")

urlpatterns = [
    *router.urls,
    path("openapi.json", Document.as_view(), name="api-document"),
]
