"""What drf-spectacular must be told of the management API."""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension


class ManagementKeyScheme(OpenApiAuthenticationExtension):
    """A key with the scope `tenant:admin` or `operator`."""

    target_class = "console.rest.authentication.ManagementKeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        """As a bearer token."""
        return {"type": "http", "scheme": "bearer"}
