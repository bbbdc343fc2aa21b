"""The app that owns the commands of the whole product, `up` and `chat`, and the admin's site."""

from django.apps import AppConfig
from django.contrib.admin import apps as admin_apps
from django.core import checks

from common.settings import check_variables


class ConfigConfig(AppConfig):
    """Settings, and the commands that start everything. It has no models."""

    name = "config"
    verbose_name = "Quire"
    default = True

    def ready(self) -> None:
        """Have `manage.py check` look at the environment too."""
        checks.register(check_variables)


class QuireAdminConfig(admin_apps.AdminConfig):
    """Django's admin with a site of our own."""

    default_site = "config.admin_site.QuireAdminSite"
    default = False
