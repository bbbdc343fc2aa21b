"""Writing presets of the playground."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from common.db import save_valid
from common.errors import Conflict, PermissionDenied
from common.files import new_id
from engine.contract.errors import InvalidRequest
from storage.access import access_preset
from storage.models import MAX_PRESET_NAME_CHARS, PlaygroundPreset, json_chars
from storage.playground_document import MAX_PRESET_CHARS, single_line, validate_preset_options
from tenants.access import access_role
from tenants.actors import require_role, to_actor
from tenants.audit import log_action
from tenants.models import Role, Tenant, User

#: Maximum number per tenant. The playground lists all of them.
MAX_PRESETS = 500


@transaction.atomic
def save_preset(
    *, actor: User, tenant: Tenant, name: str, prompt: str, options: Any
) -> PlaygroundPreset:
    """Create a preset, or overwrite the one with this name.

    Raises: `NotFound` for others' tenants, `PermissionDenied` for viewers and, if another user
    created the preset, for roles below admin; `InvalidRequest`; `Conflict` beyond `MAX_PRESETS`,
    and if another user creates one with this name at the same time.
    """
    require_role(actor, tenant, Role.MEMBER)
    line = single_line(name)
    if not 0 < len(line) <= MAX_PRESET_NAME_CHARS:
        raise InvalidRequest(
            f"name must have 1 to {MAX_PRESET_NAME_CHARS} characters.", param="name"
        )
    if "\0" in prompt:
        raise InvalidRequest("prompt must not contain NUL characters.", param="prompt")
    checked = validate_preset_options(options)
    if not prompt and not checked:
        raise InvalidRequest("A preset needs a prompt or options.", param="prompt")
    if (size := len(prompt) + json_chars(checked)) > MAX_PRESET_CHARS:
        raise InvalidRequest(
            f"A preset may have {MAX_PRESET_CHARS} characters; this one has {size}.", param="prompt"
        )
    rows = PlaygroundPreset.objects.select_for_update().filter(tenant=tenant)
    row = rows.filter(name=line).first()
    if row is not None:
        _check_may_change(actor, row)
    elif rows.count() >= MAX_PRESETS:
        raise Conflict(f"{tenant.name} has {MAX_PRESETS} presets. Delete some.", param="name")
    else:
        row = PlaygroundPreset(public_id=new_id("preset-"), tenant=tenant, user=actor, name=line)
    row.prompt, row.options = prompt, checked
    save_valid(row, unchecked=("tenant", "user"))
    log_action(to_actor(actor), "preset.save", row, tenant=tenant, name=line)
    return row


@transaction.atomic
def delete_preset(*, actor: User, public_id: str) -> None:
    """Delete a preset. Raises `NotFound`; `PermissionDenied` as `save_preset` does."""
    row = access_preset(actor, public_id)
    _check_may_change(actor, row)
    log_action(to_actor(actor), "preset.delete", row, tenant=row.tenant, name=row.name)
    row.delete()


def may_change_preset(user: User, role: Role, row: PlaygroundPreset) -> bool:
    """Whether a user with this role in the tenant created the preset, or is an admin."""
    min_role = Role.MEMBER if row.user_id == user.pk else Role.ADMIN
    return role.rank >= min_role.rank


def _check_may_change(actor: User, row: PlaygroundPreset) -> None:
    if not may_change_preset(actor, access_role(actor, row.tenant), row):
        raise PermissionDenied(
            f"{row.name} was created by somebody else; an admin may change it.", param="name"
        )
