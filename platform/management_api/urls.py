"""Routes below `/api/`."""

from django.urls import path
from rest_framework.routers import SimpleRouter

from management_api import (
    adapters,
    billing,
    mcp_servers,
    observability,
    people,
    served_models,
    tenants,
)
from management_api.schema import OpenApiDocumentView

TENANT = r"tenants/(?P<tenant>[a-z0-9-]{1,63})"

router = SimpleRouter()
router.register("users", people.UserViewSet, "api-users")
router.register("audit", people.InstallationAuditViewSet, "api-installation-audit")
router.register("settings", observability.SettingViewSet, "api-settings")
router.register("models", served_models.ServedModelViewSet, "api-models")
router.register("mcp-servers", mcp_servers.McpServerViewSet, "api-mcp-servers")
router.register("tenants", tenants.TenantViewSet, "api-tenants")
router.register(f"{TENANT}/members", people.MemberViewSet, "api-members")
router.register(f"{TENANT}/invitations", people.InvitationViewSet, "api-invitations")
router.register(f"{TENANT}/service-accounts", people.ServiceAccountViewSet, "api-service-accounts")
router.register(f"{TENANT}/keys", people.ApiKeyViewSet, "api-keys")
router.register("overview", observability.OverviewViewSet, "api-overview")
router.register("history", observability.TrafficHistoryViewSet, "api-history")
router.register("fairness", observability.FairnessViewSet, "api-fairness")
router.register("requests", observability.RequestEntryViewSet, "api-all-requests")
router.register("saved-views", observability.SavedViewViewSet, "api-saved-views")
router.register("prices", billing.PriceViewSet, "api-prices")
router.register(f"{TENANT}/budgets", billing.BudgetViewSet, "api-budgets")
router.register(f"{TENANT}/webhooks", tenants.WebhookViewSet, "api-webhooks")
router.register(f"{TENANT}/webhook-deliveries", tenants.WebhookDeliveryViewSet, "api-deliveries")
router.register(f"{TENANT}/audit", people.AuditEntryViewSet, "api-audit")
router.register("adapters/uploads", adapters.SharedAdapterUploadViewSet, "api-shared-uploads")
router.register("adapters", adapters.SharedAdapterViewSet, "api-shared-adapters")
router.register(f"{TENANT}/adapters/uploads", adapters.AdapterUploadViewSet, "api-uploads")
router.register(f"{TENANT}/adapters", adapters.AdapterViewSet, "api-adapters")
router.register(f"{TENANT}/requests", adapters.RequestStoryViewSet, "api-requests")

urlpatterns = [
    *router.urls,
    path("openapi.json", OpenApiDocumentView.as_view(), name="api-document"),
]
