"""The one way to change what tenants have stored. Functions take keywords alone.

Those that a caller asks for write an audit row in their transaction. Those of workers (progress,
leases, ends) write none: the object itself says when what happened.
"""

from storage.actions.batches import (
    cancel_batch,
    create_batch,
    create_message_batch,
    delete_batch,
    fail_batch,
    finish_batch,
    note_progress,
    start_batch,
)
from storage.actions.completions import delete_completion, store_completion, update_completion
from storage.actions.conversations import (
    create_conversation,
    delete_conversation,
    rename_conversation,
    share_conversation,
    update_conversation,
)
from storage.actions.files import create_file, delete_file, remove_expired
from storage.actions.items import (
    add_items,
    add_turn,
    create_item_conversation,
    delete_item,
    delete_item_conversation,
    update_item_conversation,
)
from storage.actions.leases import (
    claim_batch,
    claim_response,
    owner_of,
    release_lease,
    release_leases_of_dead,
    renew_lease,
)
from storage.actions.responses import (
    cancel_response,
    delete_response,
    store_response,
    update_response,
)
from storage.actions.uploads import (
    add_part,
    cancel_upload,
    complete_upload,
    create_upload,
    remove_ended_uploads,
)

__all__ = [
    "add_items",
    "add_part",
    "add_turn",
    "cancel_batch",
    "cancel_response",
    "cancel_upload",
    "claim_batch",
    "claim_response",
    "complete_upload",
    "create_batch",
    "create_conversation",
    "create_file",
    "create_item_conversation",
    "create_message_batch",
    "create_upload",
    "delete_batch",
    "delete_completion",
    "delete_conversation",
    "delete_file",
    "delete_item",
    "delete_item_conversation",
    "delete_response",
    "fail_batch",
    "finish_batch",
    "note_progress",
    "owner_of",
    "release_lease",
    "release_leases_of_dead",
    "remove_ended_uploads",
    "remove_expired",
    "rename_conversation",
    "renew_lease",
    "share_conversation",
    "start_batch",
    "store_completion",
    "store_response",
    "update_completion",
    "update_conversation",
    "update_item_conversation",
    "update_response",
]
