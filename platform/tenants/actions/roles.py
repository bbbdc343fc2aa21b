"""Reading the name of a role."""

from engine.contract.errors import InvalidRequest
from tenants.models import Role


def check_role(role: str) -> Role:
    """The role called so. Raises `InvalidRequest`."""
    if role not in Role.values:
        known = ", ".join(Role.values)
        raise InvalidRequest(f"{role!r} isn't a role. Roles are {known}.", param="role")
    return Role(role)
