"""The console's pages, what they do, and the JSON that they ask for.

A page itself is registered in `console.navigation`.
"""

from django.urls import include, path

from accounts import views as invitation
from console import static_bundles as sheets
from console.navigation import routes
from console.views import adapters, batches, keys, members
from console.views import billing as budgets
from console.views import billing as prices
from console.views import models as models_page
from console.views import overview as api
from console.views import overview as overview_fairness
from console.views import overview as overview_history
from console.views import playground as conversations
from console.views import settings as webhook
from console.views import tenants as tenant_data
from console.views import tenants as tenants_page

urlpatterns = [
    *routes(),
    path("console/keys/<int:pk>/rotate/", keys.rotate, name="rotate-key"),
    path("console/keys/<int:pk>/revoke/", keys.revoke, name="revoke-key"),
    path("console/members/invite/", members.invite, name="invite"),
    path("console/members/<int:pk>/role/", members.change_role, name="change-role"),
    path("console/members/<int:pk>/remove/", members.remove, name="remove-member"),
    path("console/invitations/<int:pk>/revoke/", members.revoke, name="revoke-invitation"),
    path("console/service-accounts/add/", members.add_account, name="add-account"),
    path(
        "console/service-accounts/<int:pk>/retire/", members.retire_account, name="retire-account"
    ),
    path("console/adapters/fetch/", adapters.fetch, name="fetch-adapter"),
    path("console/adapters/<int:pk>/", adapters.adapter, name="adapter"),
    path("console/adapters/<int:pk>/promote/", adapters.promote, name="promote-adapter"),
    path("console/adapters/<int:pk>/rollback/", adapters.rollback, name="rollback-adapter"),
    path("console/adapters/<int:pk>/offline/", adapters.take_offline, name="adapter-offline"),
    path("console/adapters/<int:pk>/pin/", adapters.pin, name="pin-adapter"),
    path("console/adapters/<int:pk>/alias/delete/", adapters.delete_alias, name="delete-alias"),
    path("console/adapters/<int:pk>/delete/", adapters.delete, name="delete-adapter"),
    path(
        "console/adapters/<int:pk>/versions/<int:number>/",
        adapters.change,
        name="adapter-version",
    ),
    path("console/api/adapters", adapters.adapter_status_json, name="console-adapters"),
    path("console/budgets/set/", budgets.set_budget, name="set-budget"),
    path("console/budgets/<int:pk>/delete/", budgets.delete_budget, name="delete-budget"),
    path("console/prices/set/", prices.set_price, name="set-price"),
    path("console/prices/<int:pk>/delete/", prices.delete_price, name="delete-price"),
    path("console/webhook/set/", webhook.set_webhook, name="set-webhook"),
    path("console/webhook/delete/", webhook.delete_webhook, name="delete-webhook"),
    path("console/webhook/test/", webhook.try_webhook, name="try-webhook"),
    path("console/webhook/<int:pk>/again/", webhook.send_again, name="send-again"),
    path("console/data/keep/", tenant_data.keep, name="keep-data"),
    path("console/data/export/", tenant_data.export, name="export-data"),
    path("console/data/erase/", tenant_data.erase, name="erase-data"),
    path("invitation/<str:token>/", invitation.invitation, name="invitation"),
    path("console/api/model-states", models_page.states, name="console-model-states"),
    path("console/api/model", models_page.progress, name="console-model"),
    path("console/api/replica-log", models_page.log, name="console-log"),
    path("console/batches/add/", batches.add_batch, name="add-batch"),
    path("console/batches/<str:public_id>/", batches.batch, name="batch"),
    path("console/batches/<str:public_id>/cancel/", batches.cancel, name="cancel-batch"),
    path("console/files/upload/", batches.upload, name="upload-file"),
    path("console/files/<str:public_id>/", batches.download, name="download-file"),
    path("console/files/<str:public_id>/delete/", batches.delete, name="delete-file"),
    path("console/api/batches", batches.progress, name="console-batches"),
    path("console/api/models", api.models, name="console-models"),
    path("console/api/conversations", conversations.conversations, name="console-conversations"),
    path(
        "console/api/conversations/<str:public_id>",
        conversations.conversation,
        name="console-conversation",
    ),
    path("console/api/overview", api.overview_json, name="console-overview"),
    path("console/api/history", overview_history.history, name="console-history"),
    path("console/api/fairness", overview_fairness.figures, name="console-fairness"),
    path("console/tenants/create/", tenants_page.create, name="create-tenant"),
    path("console/tenants/<slug:slug>/", tenants_page.tenant, name="tenant"),
    path("console/tenants/<slug:slug>/limits/", tenants_page.limit, name="limit-tenant"),
    path("console/api/usage", api.usage, name="console-usage"),
    path("styles/<slug:name>-<slug:digest>.css", sheets.joined_sheet, name="sheet"),
    path("", include("accounts.urls")),
]
