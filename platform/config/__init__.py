"""The Django project: settings, urls, asgi, celery, and the commands that run all of Quire."""

from config.celery import app as celery_app

__all__ = ["celery_app"]
