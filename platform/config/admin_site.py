"""The admin site: Quire's apps come first, and users log in through the console."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from allauth.core.exceptions import ReauthenticationRequired
from django.contrib import admin
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse

from accounts.reauthentication import is_recently_authenticated

#: Order of the apps on the index page; all others follow.
ORDER = ("tenants", "catalog", "adapters", "metering", "storage")
NAMES = {"auth": "Groups of staff"}
#: Apps that the admin hides: anyone who can edit their rows could log in as any user.
CLOSED = frozenset({"account", "mfa", "socialaccount", "usersessions"})


class QuireAdminSite(admin.AdminSite):
    """Django's admin site with Quire's apps first."""

    site_title = "Quire"
    site_header = "Quire"
    index_title = "Raw data"
    #: Replaced by the console's navigation.
    enable_nav_sidebar = False

    def register(self, model_or_iterable: Any, *args: Any, **options: Any) -> None:
        """Register models, except those of the apps in `CLOSED`."""
        models = model_or_iterable
        if isinstance(models, type):
            models = [models]
        open_models = [model for model in models if model._meta.app_label not in CLOSED]
        super().register(open_models, *args, **options)

    def admin_view(self, view: Callable[..., HttpResponseBase], cacheable: bool = False) -> Any:
        """Require a recent login for changes."""

        @wraps(view)
        def checked(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if request.method == "POST" and not is_recently_authenticated(request):
                raise ReauthenticationRequired
            return view(request, *args, **kwargs)

        return super().admin_view(checked, cacheable)

    def login(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Redirect to the console's login page, which also asks for second factors."""
        if request.user.is_authenticated:
            raise PermissionDenied
        return redirect_to_login(request.GET.get("next") or reverse("admin:index"))

    def password_change(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Redirect to the console's page for changing a password."""
        return redirect("password")

    def get_app_list(
        self, request: HttpRequest, app_label: str | None = None
    ) -> list[dict[str, Any]]:
        """Return the apps that the user may see, sorted by `ORDER` and renamed by `NAMES`."""
        app_list = super().get_app_list(request, app_label)
        for app in app_list:
            app["name"] = NAMES.get(app["app_label"], app["name"])
        return sorted(app_list, key=lambda app: _section_order(app["app_label"]))


def _section_order(label: str) -> int:
    return ORDER.index(label) if label in ORDER else len(ORDER)
