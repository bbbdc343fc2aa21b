"""The Django project: settings, urls, asgi, celery, and the commands that run all of Quire."""

from engine.system.light_imports import import_blocking

# For a terminal's colours and Twisted's own log it would load both: a thirtieth of a start.
import_blocking("structlog", "rich", "twisted")
