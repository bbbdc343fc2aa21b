"""The one way to change adapters: each checks its actor, writes, and leaves an audit row."""

from adapters.actions.adapters import (
    add_from_folder,
    add_from_hub,
    add_staged,
    check_again,
    delete_adapter,
    delete_version,
    known_digest,
    newest_passed,
    nothing_passed,
    retire,
    staged_content,
)
from adapters.actions.traffic import delete_alias, pin, promote, rollback, take_offline, unpin
from adapters.actions.uploads import (
    add_piece,
    begin_upload,
    expire_uploads,
    finish_upload,
    give_up_upload,
    offsets,
)

__all__ = [
    "add_from_folder",
    "add_from_hub",
    "add_piece",
    "add_staged",
    "begin_upload",
    "check_again",
    "delete_adapter",
    "delete_alias",
    "delete_version",
    "expire_uploads",
    "finish_upload",
    "give_up_upload",
    "known_digest",
    "newest_passed",
    "nothing_passed",
    "offsets",
    "pin",
    "promote",
    "retire",
    "rollback",
    "staged_content",
    "take_offline",
    "unpin",
]
