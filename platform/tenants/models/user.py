"""A person who logs in."""

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils.crypto import salted_hmac


class User(AbstractUser):
    """Django's user, whose sessions can all be ended at once."""

    operator_by_sign_on = models.BooleanField(
        default=False, editable=False, help_text="Made an operator by a group of the provider."
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
