"""Routes of the console's actions and JSON; pages are registered in `console.navigation`."""

from django.urls import include, path

from accounts.views import invitation
from console.navigation import routes
from console.static_bundles import joined_sheet
from console.views import (
    adapters,
    alerts,
    batches,
    billing,
    feedback,
    find,
    keys,
    mcp_servers,
    members,
    models,
    overview,
    playground,
    playground_tabs,
    settings,
    tenants,
)

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
    path("console/alerts/<int:pk>/silence/", alerts.silence, name="silence-alert"),
    path("console/alerts/webhook/set/", alerts.set_webhook, name="alerts-set-webhook"),
    path("console/alerts/webhook/delete/", alerts.delete_webhook, name="alerts-delete-webhook"),
    path("console/alerts/webhook/test/", alerts.try_webhook, name="alerts-try-webhook"),
    path("console/alerts/webhook/<int:pk>/again/", alerts.send_again, name="alerts-send-again"),
    path("console/mcp-servers/set/", mcp_servers.set_server, name="set-mcp-server"),
    path(
        "console/mcp-servers/<slug:name>/test/", mcp_servers.check_server, name="check-mcp-server"
    ),
    path(
        "console/mcp-servers/<slug:name>/delete/",
        mcp_servers.delete_server,
        name="delete-mcp-server",
    ),
    path("console/budgets/set/", billing.set_budget, name="set-budget"),
    path("console/budgets/<int:pk>/delete/", billing.delete_budget, name="delete-budget"),
    path("console/prices/set/", billing.set_price, name="set-price"),
    path("console/prices/<int:pk>/delete/", billing.delete_price, name="delete-price"),
    path("console/webhook/set/", settings.set_webhook, name="set-webhook"),
    path("console/webhook/delete/", settings.delete_webhook, name="delete-webhook"),
    path("console/webhook/test/", settings.try_webhook, name="try-webhook"),
    path("console/webhook/<int:pk>/again/", settings.send_again, name="send-again"),
    path("console/data/keep/", tenants.keep, name="keep-data"),
    path("console/data/export/", tenants.export, name="export-data"),
    path("console/data/erase/", tenants.erase, name="erase-data"),
    path("invitation/<str:token>/", invitation, name="invitation"),
    path("console/api/model-states", models.states, name="console-model-states"),
    path("console/api/model", models.progress, name="console-model"),
    path("console/api/replica-log", models.log, name="console-log"),
    path("console/batches/add/", batches.add_batch, name="add-batch"),
    path("console/batches/<str:public_id>/", batches.batch, name="batch"),
    path("console/batches/<str:public_id>/cancel/", batches.cancel, name="cancel-batch"),
    path("console/files/upload/", batches.upload, name="upload-file"),
    path("console/files/<str:public_id>/", batches.download, name="download-file"),
    path("console/files/<str:public_id>/delete/", batches.delete, name="delete-file"),
    path("console/api/batches", batches.progress, name="console-batches"),
    path("console/api/models", overview.models, name="console-models"),
    path("console/api/conversations", playground.conversations, name="console-conversations"),
    path(
        "console/api/conversations/<str:public_id>",
        playground.conversation,
        name="console-conversation",
    ),
    path("console/playground/<slug:kind>/", playground_tabs.playground_tab, name="playground-tab"),
    *(
        path(
            f"console/api/run/{kind}",
            playground_tabs.session_view(endpoint),
            name=f"run-{kind}",
        )
        for kind, (_, endpoint, _) in playground_tabs.TABS.items()
    ),
    path("console/api/presets", playground.presets, name="console-presets"),
    path("console/api/presets/<str:public_id>", playground.preset, name="console-preset"),
    path("console/api/overview", overview.overview_json, name="console-overview"),
    path("console/api/history", overview.history, name="console-history"),
    path("console/api/fairness", overview.figures, name="console-fairness"),
    path("console/tenants/create/", tenants.create, name="create-tenant"),
    path("console/tenants/<slug:slug>/", tenants.tenant, name="tenant"),
    path("console/tenants/<slug:slug>/limits/", tenants.limit, name="limit-tenant"),
    path("console/api/pictures", playground.upload_picture, name="console-pictures"),
    path("console/api/feedback/<str:name>", feedback.feedback, name="console-feedback"),
    path("console/feedback/export/", feedback.export, name="export-feedback"),
    path("console/api/find", find.find, name="console-find"),
    path("console/api/usage", overview.usage, name="console-usage"),
    path("styles/<slug:name>-<slug:digest>.css", joined_sheet, name="sheet"),
    path("", include("accounts.urls")),
]
