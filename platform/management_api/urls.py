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
from management_api.schema import OpenApiDocumentView

TENANT = r"tenants/(?P<tenant>[a-z0-9-]{1,63})"

router = SimpleRouter()
router.register("users", views.UserViewSet, "api-users")
router.register("audit", views.InstallationAuditViewSet, "api-installation-audit")
router.register("settings", settings.SettingViewSet, "api-settings")
router.register("models", models.ServedModelViewSet, "api-models")
router.register("tenants", tenants.TenantViewSet, "api-tenants")
router.register(f"{TENANT}/members", views.MemberViewSet, "api-members")
router.register(f"{TENANT}/invitations", views.InvitationViewSet, "api-invitations")
router.register(f"{TENANT}/service-accounts", views.ServiceAccountViewSet, "api-service-accounts")
router.register(f"{TENANT}/keys", views.ApiKeyViewSet, "api-keys")
router.register("blocks", inside.BlockMapViewSet, "api-blocks")
router.register("isolation", inside.IsolationCheckViewSet, "api-isolation")
router.register("overview", overview.OverviewViewSet, "api-overview")
router.register("history", overview.TrafficHistoryViewSet, "api-history")
router.register("fairness", overview.FairnessViewSet, "api-fairness")
router.register("requests", requests.RequestEntryViewSet, "api-all-requests")
router.register("prices", money.PriceViewSet, "api-prices")
router.register(f"{TENANT}/budgets", money.BudgetViewSet, "api-budgets")
router.register(f"{TENANT}/webhooks", webhooks.WebhookViewSet, "api-webhooks")
router.register(f"{TENANT}/webhook-deliveries", webhooks.WebhookDeliveryViewSet, "api-deliveries")
router.register(f"{TENANT}/audit", views.AuditEntryViewSet, "api-audit")
router.register("adapters/uploads", adapters.SharedAdapterUploadViewSet, "api-shared-uploads")
router.register("adapters", adapters.SharedAdapterViewSet, "api-shared-adapters")
router.register(f"{TENANT}/adapters/uploads", adapters.AdapterUploadViewSet, "api-uploads")
router.register(f"{TENANT}/adapters", adapters.AdapterViewSet, "api-adapters")
router.register(f"{TENANT}/requests", adapters.RequestStoryViewSet, "api-requests")

urlpatterns = [
    *router.urls,
    path("openapi.json", OpenApiDocumentView.as_view(), name="api-document"),
]
