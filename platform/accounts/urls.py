"""Login, passwords, second factors, sessions, single sign-on. There is no sign-up page."""

from allauth.account import views as account
from django.urls import include, path, re_path

from accounts.views import end_session, password_reset

urlpatterns = [
    path("login/", account.login, name="login"),
    path("login/", account.login, name="account_login"),
    path("logout/", account.logout, name="logout"),
    path("logout/", account.logout, name="account_logout"),
    path("account/signup/", account.signup, name="account_signup"),
    path("account/inactive/", account.account_inactive, name="account_inactive"),
    path("account/reauthenticate/", account.reauthenticate, name="account_reauthenticate"),
    path("account/password/", account.password_change, name="password"),
    path("account/password/", account.password_change, name="account_change_password"),
    path("account/password/set/", account.password_set, name="account_set_password"),
    path("account/password/reset/", password_reset, name="account_reset_password"),
    path(
        "account/password/reset/done/",
        account.password_reset_done,
        name="account_reset_password_done",
    ),
    re_path(
        r"^account/password/reset/key/(?P<uidb36>[0-9A-Za-z]+)-(?P<key>.+)/$",
        account.password_reset_from_key,
        name="account_reset_password_from_key",
    ),
    path(
        "account/password/reset/key/done/",
        account.password_reset_from_key_done,
        name="account_reset_password_from_key_done",
    ),
    path("account/2fa/", include("allauth.mfa.urls")),
    path("account/sessions/<int:pk>/end/", end_session, name="end-session"),
    path("account/sessions/", include("allauth.usersessions.urls")),
    path("account/sign-on/", include("allauth.socialaccount.urls")),
    path("account/", include("allauth.socialaccount.providers.openid_connect.urls")),
]
