"""The console's pages, and the JSON that they ask for."""

from django.urls import path

from console import api, keys, views

urlpatterns = [
    path("", views.playground, name="playground"),
    path("console/", views.overview, name="overview"),
    path("console/keys/", keys.keys, name="keys"),
    path("console/keys/<int:pk>/rotate/", keys.rotate, name="rotate-key"),
    path("console/keys/<int:pk>/revoke/", keys.revoke, name="revoke-key"),
    path("console/api/models", api.models, name="console-models"),
    path("console/api/overview", api.overview, name="console-overview"),
    path("console/api/usage", api.usage, name="console-usage"),
    path("login/", views.LoginView.as_view(), name="login"),
    path("logout/", views.LogoutView.as_view(), name="logout"),
    path("account/password/", views.PasswordChangeView.as_view(), name="password"),
]
