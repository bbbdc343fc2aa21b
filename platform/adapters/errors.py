"""What the store of adapters answers when it refuses."""

from catalog.errors import HubUnavailable
from engine.contract.errors import InvalidRequest
from tenants.errors import Conflict, NotFound, PermissionDenied, ServiceUnavailable

__all__ = [
    "AdapterInvalid",
    "AdapterTooLarge",
    "Conflict",
    "HubUnavailable",
    "NotFound",
    "PermissionDenied",
    "ServiceUnavailable",
    "WrongOffset",
]


class AdapterInvalid(InvalidRequest):
    """These files are no adapter, or none that can be trusted."""

    code = "invalid_adapter"


class AdapterTooLarge(InvalidRequest):
    """It's over the limit of one adapter, or of all that its tenant keeps."""

    status = 413
    code = "adapter_too_large"


class WrongOffset(Conflict):
    """A piece of an upload begins elsewhere than the bytes before it end."""

    code = "wrong_offset"

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message, param="offset")
        self.offset = offset
        self.headers = {"Upload-Offset": str(offset)}
