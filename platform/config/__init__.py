"""The Django project: settings, urls, asgi, celery, and the commands that run all of Quire."""
