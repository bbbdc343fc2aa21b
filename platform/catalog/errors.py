"""What the catalogue answers when it refuses."""

from engine.contract.errors import QuireError
from tenants.errors import Conflict, NotFound

__all__ = ["Conflict", "HubUnavailable", "ModelNotFound"]


class ModelNotFound(NotFound):
    """There's no such model, or it's not for this caller: both look the same."""

    code = "model_not_found"


class HubUnavailable(QuireError):
    """The hub can't be reached from here, or doesn't answer as it should."""

    status = 502
    code = "hub_unavailable"
    error_type = "server_error"
