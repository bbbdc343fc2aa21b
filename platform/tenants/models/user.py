"""A person who logs in."""

from typing import Any

from django.contrib.auth.models import AbstractUser, UserManager
from django.db import models, transaction
from django.utils.crypto import salted_hmac


class People(UserManager):
    """Django's, whose `manage.py createsuperuser` leaves an audit row too."""

    use_in_migrations = False

    def create_superuser(
        self, username: str, email: str | None = None, password: str | None = None, **more: Any
    ) -> Any:
        """An operator, made at the command line; everybody else is made by the actions."""
        from tenants.actors import COMMAND_LINE
        from tenants.audit import record

        with transaction.atomic(using=self.db):
            made = super().create_superuser(username, email, password, **more)
            changes = {"username": [None, username], "is_superuser": [None, True]}
            record(actor=COMMAND_LINE, action="user.create", target=made, changes=changes)
        return made


class User(AbstractUser):
    """Django's user, whose sessions can all be ended at once."""

    objects = People()

    operator_by_sign_on = models.BooleanField(
        default=False,
        editable=False,
        help_text="Operator role granted by a group of the identity provider.",
    )
    session_epoch = models.PositiveIntegerField(default=0, editable=False)

    def _get_session_auth_hash(self, secret: str | None = None) -> str:
        """What a session must hold to go on: a new password or a new epoch ends them all.

        Django compares it at every request, so that a session ends everywhere at once, known to
        us or not.
        """
        salt = "tenants.models.User.get_session_auth_hash"
        value = f"{self.password}\0{self.session_epoch}"
        return salted_hmac(salt, value, secret=secret, algorithm="sha256").hexdigest()
