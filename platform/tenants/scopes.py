"""What a key may be used for."""

from engine.contract.errors import InvalidRequest

INFERENCE = "inference"  # generate, embed, tokenize
MODELS = "models:read"  # list models
USAGE = "usage:read"  # read the tenant's own usage
TENANT_ADMIN = "tenant:admin"  # manage members, keys and the like, with the holder's role
OPERATOR = "operator"  # reset caches, read server internals; given by superusers alone

ALL = frozenset({INFERENCE, MODELS, USAGE, TENANT_ADMIN, OPERATOR})
DEFAULT = frozenset({INFERENCE, MODELS, USAGE})


def check_scopes(scopes: object) -> list[str]:
    """The scopes sorted. Raises `InvalidRequest` for an unknown one or none at all."""
    if not isinstance(scopes, list | tuple | set | frozenset) or not scopes:
        raise InvalidRequest("scopes must be a list with at least one scope.", param="scopes")
    for scope in scopes:
        if not isinstance(scope, str) or scope not in ALL:
            known = ", ".join(sorted(ALL))
            raise InvalidRequest(f"{scope!r} isn't a scope. Scopes are {known}.", param="scopes")
    return sorted(set(scopes))


def default_scopes() -> list[str]:
    """The scopes of a key for which none were named."""
    return sorted(DEFAULT)
