"""What the catalogue answers when it refuses."""

from tenants.errors import Conflict, NotFound

__all__ = ["Conflict", "ModelNotFound"]


class ModelNotFound(NotFound):
    """There's no such model, or it's not for this caller: both look the same."""

    code = "model_not_found"
