"""`ModelRegistry`: architectures whose code lives outside of the engine."""

from __future__ import annotations

import importlib
import logging
import re
from typing import Any, ClassVar

from engine.contract.errors import ConfigError, ModelLoadError

log = logging.getLogger(__name__)

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_CONTRACT = ("make_spec", "load", "allocate_kv", "forward", "logits")


class ModelRegistry:
    """Classes for architectures, given by whoever embeds the engine. They come before our own."""

    _classes: ClassVar[dict[str, type | str]] = {}

    @classmethod
    def register_model(cls, architecture: str, model: type | str) -> None:
        """Serve checkpoints whose config.json names `architecture` with `model`.

        Args:
            architecture: a name in config.json's `architectures`.
            model: a class, or "package.module:Class", which is imported when such a checkpoint is
                loaded. Either a subclass of `transformers.PreTrainedModel` whose attention goes
                through `transformers`' attention interface, which then runs as any model of
                `transformers` does; or a class with the methods of `interface.OutsideModel`.

        An architecture that is known already is taken over, with a warning. Raises `ConfigError`
        for what is neither a class nor such a string.
        """
        if not isinstance(architecture, str) or not architecture:
            raise ConfigError(f"An architecture is a name, not {architecture!r}.", param="model")
        if not isinstance(model, type) and not (isinstance(model, str) and _PATH.fullmatch(model)):
            raise ConfigError(
                f'A model is a class or "package.module:Class", not {model!r}.', param="model"
            )
        if cls._classes.get(architecture, model) != model or _is_native(architecture):
            log.warning("%s is known already; from now on it is %s", architecture, model)
        cls._classes[architecture] = model

    @classmethod
    def unregister_model(cls, architecture: str) -> None:
        """Forget a registered class; unknown names are no error."""
        cls._classes.pop(architecture, None)

    @classmethod
    def get_supported_archs(cls) -> list[str]:
        """Architectures that run natively or by a registered class."""
        from engine.models.architectures import known_architectures

        return sorted({*known_architectures(), *cls._classes})

    @classmethod
    def find(cls, config: dict[str, Any]) -> type | None:
        """The class registered for a config.json, imported; None: there is none.

        Raises `ModelLoadError` when it can't be imported or lacks a method.
        """
        names = config.get("architectures") or []
        name = next((name for name in names if name in cls._classes), None)
        if name is None:
            return None
        found = cls._classes[name]
        model = _imported(name, found) if isinstance(found, str) else found
        missing = [] if is_transformers(model) else [m for m in _CONTRACT if not hasattr(model, m)]
        if missing:
            raise ModelLoadError(
                f"{name}: {model.__qualname__} lacks {', '.join(missing)} and is no "
                "transformers.PreTrainedModel.",
                param="model",
            )
        return model


def is_transformers(model: type) -> bool:
    """Whether this is a model class of `transformers`, which the bridge runs."""
    from transformers import PreTrainedModel

    return issubclass(model, PreTrainedModel)


def _is_native(architecture: str) -> bool:
    from engine.models.architectures import known_architectures

    return architecture in known_architectures()


def _imported(architecture: str, path: str) -> type:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ModelLoadError(
            f"{architecture}: {path} can't be imported: {error}", param="model"
        ) from error
    if not isinstance(found, type):
        raise ModelLoadError(f"{architecture}: {path} is no class.", param="model")
    return found
