"""Kills processes under load and counts what is lost."""

from django.apps import AppConfig


class ChaosConfig(AppConfig):
    """Kills processes under load and counts what is lost: no models."""

    name = "chaos"
    verbose_name = "Chaos"
