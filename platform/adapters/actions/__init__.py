"""The only functions that change adapters: each checks its actor, writes, and audits the change."""

from adapters.actions.adapters import (
    add_from_folder,
    add_from_hub,
    add_staged,
    delete_adapter,
    delete_version,
    latest_valid_version,
    no_valid_version_error,
    referenced_digests,
    retire_version,
    revalidate_version,
    staged_content,
)
from adapters.actions.traffic import delete_alias, pin, promote, rollback, take_offline, unpin
from adapters.actions.uploads import (
    append_chunk,
    begin_upload,
    cancel_upload,
    expire_uploads,
    finish_upload,
    received_bytes,
)

__all__ = [
    "add_from_folder",
    "add_from_hub",
    "add_staged",
    "append_chunk",
    "begin_upload",
    "cancel_upload",
    "delete_adapter",
    "delete_alias",
    "delete_version",
    "expire_uploads",
    "finish_upload",
    "latest_valid_version",
    "no_valid_version_error",
    "pin",
    "promote",
    "received_bytes",
    "referenced_digests",
    "retire_version",
    "revalidate_version",
    "rollback",
    "staged_content",
    "take_offline",
    "unpin",
]
