"""A person who logs in."""

from django.contrib.auth.models import AbstractUser


class User(AbstractUser):
    """Django's user in a table of our own, so that it can grow without a migration of the world."""
