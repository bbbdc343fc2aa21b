"""The apps with the product-wide commands, such as `up` and `chat`, and with the admin site."""

from django.apps import AppConfig
from django.contrib.admin import apps as admin_apps
from django.core import checks

from common.settings_environment import check_variables


class ConfigConfig(AppConfig):
    """The settings and the product-wide commands. This app has no models."""

    name = "config"
    verbose_name = "Quire"
    default = True

    def ready(self) -> None:
        """Register the check of environment variables with `manage.py check`."""
        checks.register(check_variables)


class QuireAdminConfig(admin_apps.AdminConfig):
    """Django's admin with Quire's own site class."""

    default_site = "config.admin_site.QuireAdminSite"
    default = False
