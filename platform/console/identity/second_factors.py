"""allauth's hooks for second factors."""

from __future__ import annotations

from allauth.mfa.adapter import DefaultMFAAdapter

from tenants.shown_once import boxes


class SecondFactorAdapter(DefaultMFAAdapter):
    """Secrets of authenticators are encrypted with a key that isn't in the database."""

    def encrypt(self, text: str) -> str:
        """For the database."""
        return boxes("second factors").encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        """From the database."""
        return boxes("second factors").decrypt(encrypted_text.encode()).decode()
