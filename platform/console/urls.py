"""The console's pages, and the JSON that they ask for."""

from django.urls import include, path

from console import adapters, api, audit, invitation, keys, members, views

urlpatterns = [
    path("", views.playground, name="playground"),
    path("console/", views.overview, name="overview"),
    path("console/keys/", keys.keys, name="keys"),
    path("console/keys/<int:pk>/rotate/", keys.rotate, name="rotate-key"),
    path("console/keys/<int:pk>/revoke/", keys.revoke, name="revoke-key"),
    path("console/members/", members.members, name="members"),
    path("console/members/invite/", members.invite, name="invite"),
    path("console/members/<int:pk>/role/", members.change_role, name="change-role"),
    path("console/members/<int:pk>/remove/", members.remove, name="remove-member"),
    path("console/invitations/<int:pk>/revoke/", members.revoke, name="revoke-invitation"),
    path("console/service-accounts/add/", members.add_account, name="add-account"),
    path(
        "console/service-accounts/<int:pk>/retire/", members.retire_account, name="retire-account"
    ),
    path("console/adapters/", adapters.adapters, name="adapters"),
    path("console/adapters/fetch/", adapters.fetch, name="fetch-adapter"),
    path("console/adapters/<int:pk>/", adapters.adapter, name="adapter"),
    path("console/adapters/<int:pk>/promote/", adapters.promote, name="promote-adapter"),
    path("console/adapters/<int:pk>/rollback/", adapters.rollback, name="rollback-adapter"),
    path("console/adapters/<int:pk>/offline/", adapters.offline, name="adapter-offline"),
    path("console/adapters/<int:pk>/alias/delete/", adapters.drop_alias, name="delete-alias"),
    path("console/adapters/<int:pk>/delete/", adapters.delete, name="delete-adapter"),
    path(
        "console/adapters/<int:pk>/versions/<int:number>/",
        adapters.change,
        name="adapter-version",
    ),
    path("console/api/adapters", adapters.figures, name="console-adapters"),
    path("console/audit/", audit.audit, name="audit"),
    path("invitation/<str:token>/", invitation.invitation, name="invitation"),
    path("console/api/models", api.models, name="console-models"),
    path("console/api/overview", api.overview, name="console-overview"),
    path("console/api/usage", api.usage, name="console-usage"),
    path("", include("console.identity.urls")),
]
