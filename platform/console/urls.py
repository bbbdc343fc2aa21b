"""The console's pages, and the JSON that they ask for."""

from django.urls import include, path

from console import api, audit, invitation, keys, members, views

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
    path("console/audit/", audit.audit, name="audit"),
    path("invitation/<str:token>/", invitation.invitation, name="invitation"),
    path("console/api/models", api.models, name="console-models"),
    path("console/api/overview", api.overview, name="console-overview"),
    path("console/api/usage", api.usage, name="console-usage"),
    path("", include("console.identity.urls")),
]
