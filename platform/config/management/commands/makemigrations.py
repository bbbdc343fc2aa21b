from django.core.management.commands import makemigrations

from config.autodetector import DatabaseAutodetector


class Command(makemigrations.Command):
    autodetector = DatabaseAutodetector
