"""The Django project: settings, urls, asgi, celery, and the commands that run all of Quire."""

from engine.system.light_imports import import_blocking

# structlog would import both, for terminal colours and for Twisted's logs: 3% of the start-up time.
import_blocking("structlog", "rich", "twisted")
