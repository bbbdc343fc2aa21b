"""The app's tables."""

from adapters.models.adapter import Adapter
from adapters.models.alias import AdapterAlias
from adapters.models.upload import AdapterUpload
from adapters.models.version import PASSED, WORKING, AdapterVersion, VersionState

__all__ = [
    "PASSED",
    "WORKING",
    "Adapter",
    "AdapterAlias",
    "AdapterUpload",
    "AdapterVersion",
    "VersionState",
]
