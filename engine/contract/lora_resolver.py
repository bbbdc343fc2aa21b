"""`LoRAResolver`: what a package subclasses to find adapters by name. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from importlib.metadata import EntryPoint

from engine.contract.errors import ConfigError
from engine.contract.lora_request import LoRARequest
from engine.contract.plugins import checked_class, named_by, wanted

GROUP = "quire.lora_resolvers"


class LoRAResolver(ABC):
    """Finds the files of an adapter that a request names and nobody has loaded.

    One is made in each gateway and worker, and called in its event loop: hand slow work to a
    thread. A method that raises is told in the log, and its caller is asked to try again.
    """

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter, or None where there is none.

        The answer is the same whoever asks: a resolver learns no tenant.

        Args:
            base_model_name: what the model was loaded from, a folder or a hub id; also the name
                that it's served by, where that is another.
            lora_name: as the client sent it, without the model's name.
        """


class LoRAResolverRegistry:
    """Where a function that an entry point names puts its resolvers, as in vLLM."""

    _resolvers: dict[str, LoRAResolver] = {}

    @classmethod
    def register_resolver(cls, resolver_name: str, resolver: LoRAResolver) -> None:
        """Add one; another of the name gives way."""
        if not isinstance(resolver, LoRAResolver):
            raise TypeError(f"{resolver!r} is no LoRAResolver.")
        cls._resolvers[resolver_name] = resolver

    @classmethod
    def get_supported_resolvers(cls) -> Set[str]:
        """Their names."""
        return cls._resolvers.keys()

    @classmethod
    def get_resolver(cls, resolver_name: str) -> LoRAResolver:
        """One by its name. Raises KeyError."""
        if resolver_name not in cls._resolvers:
            raise KeyError(f"There is no LoRA resolver {resolver_name!r}.")
        return cls._resolvers[resolver_name]


def installed_resolvers() -> dict[str, LoRAResolver]:
    """By name, in its order: those of the wanted entry points and those that were registered.

    Raises `ConfigError` for one that can't be made.
    """
    made = {point.name: _made(point) for point in wanted(GROUP)}
    found = {name: each for name, each in made.items() if each is not None}
    names = LoRAResolverRegistry.get_supported_resolvers()
    found |= {name: LoRAResolverRegistry.get_resolver(name) for name in names}
    return dict(sorted(found.items()))


def _made(point: EntryPoint) -> LoRAResolver | None:
    """None for a function that has registered what it brings."""
    found = named_by(point)
    if found is None:
        return None
    kind = checked_class(point, found, LoRAResolver)  # type: ignore[type-abstract]
    try:
        return kind()
    except Exception as error:
        raise ConfigError(
            f"The LoRA resolver {point.name} ({point.value}) can't be made: {error}",
            param="QUIRE_PLUGINS",
        ) from error
