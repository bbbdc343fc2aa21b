"""What drf-spectacular must be told: our schemas are pydantic's, our keys are bearer tokens."""

from __future__ import annotations

from typing import Any

from drf_spectacular.contrib.pydantic import PydanticExtension
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.plumbing import ResolvedComponent

REF = "#/components/schemas/{model}"


class RequestsAndAnswers(PydanticExtension):
    """Requests as they are checked, with the names that clients use; answers as they are sent."""

    priority = 1

    def map_serializer(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        """The JSON schema of the class; classes inside it become components of their own."""
        mode = "validation" if direction == "request" else "serialization"
        schema: dict[str, Any] = self.target.model_json_schema(ref_template=REF, mode=mode)
        for name, part in schema.pop("$defs", {}).items():
            component = ResolvedComponent(name, ResolvedComponent.SCHEMA, part, name)
            auto_schema.registry.register_on_missing(component)
        return schema


class ApiKeyScheme(OpenApiAuthenticationExtension):
    """`Authorization: Bearer sk-quire-...`, or `x-api-key`."""

    target_class = "inference.web.authentication.ApiKeyAuthentication"
    name = ["bearer", "apiKey"]

    def get_security_definition(self, auto_schema: Any) -> list[dict[str, Any]]:
        """Both ways to send a key."""
        return [
            {"type": "http", "scheme": "bearer"},
            {"type": "apiKey", "in": "header", "name": "x-api-key"},
        ]
