"""The admin's site: Quire's apps first, and the console's log-in."""

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

#: Apps in the order of the index; others follow.
ORDER = ("tenants", "catalog", "adapters", "metering", "storage")
NAMES = {"auth": "Groups of staff"}
#: Apps whose rows the admin hides: whoever edits them could log in as anybody.
CLOSED = frozenset({"account", "mfa", "socialaccount", "usersessions"})


class QuireAdminSite(admin.AdminSite):
    """Django's site, with our apps first."""

    site_title = "Quire"
    site_header = "Quire"
    index_title = "Raw data"
    #: The console's own navigation stands in its place.
    enable_nav_sidebar = False

    def register(self, model_or_iterable: Any, *args: Any, **options: Any) -> None:
        """Register models, except those of closed apps."""
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
        """Redirect to the page that everybody logs in on, which asks for second factors too."""
        if request.user.is_authenticated:
            raise PermissionDenied
        return redirect_to_login(request.GET.get("next") or reverse("admin:index"))

    def password_change(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Redirect to the page that everybody changes their password on."""
        return redirect("password")

    def get_app_list(
        self, request: HttpRequest, app_label: str | None = None
    ) -> list[dict[str, Any]]:
        """The apps that the user may see, in our order and under names that say what they hold."""
        app_list = super().get_app_list(request, app_label)
        for app in app_list:
            app["name"] = NAMES.get(app["app_label"], app["name"])
        return sorted(app_list, key=lambda app: _section_order(app["app_label"]))


def _section_order(label: str) -> int:
    return ORDER.index(label) if label in ORDER else len(ORDER)
