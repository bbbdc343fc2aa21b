"""`EngineArgs`: an engine's settings with vLLM's names, as a dataclass and as a command line."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from engine.contract.command_line import expand_args
from engine.contract.engine_config import EngineConfig, add_cli_args
from engine.contract.errors import ConfigError
from engine.contract.vllm_flags import VLLM_FLAGS
from engine.contract.vllm_variables import unused_variables

log = logging.getLogger(__name__)


def PoolerConfig(**settings: Any) -> dict[str, Any]:
    """Return the setting `pooler_config`. Unset fields default to the model's."""
    return {name: value for name, value in settings.items() if value is not None}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that accepts underscores, dotted names and `--config FILE`, like vLLM's."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line, by default sys.argv."""
        try:
            words = expand_args(sys.argv[1:] if args is None else args, self)
        except ConfigError as error:
            self.error(error.message)
        return super().parse_known_args(words, namespace)


class _Methods:
    """Methods of `EngineArgs`."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each setting, and return the parser."""
        add_cli_args(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Build from parsed flags. Unset flags have their defaults."""
        names = {spec.name for spec in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values = {name: value for name, value in vars(args).items() if value is not None}
        return cls(**{name: value for name, value in values.items() if name in names})

    def create_engine_config(self) -> EngineConfig:
        """Return the validated settings. Raises `ConfigError`."""
        names = [spec.name for spec in dataclasses.fields(self)]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names}
        return offline_config({name: value for name, value in values.items() if value is not None})


def offline_config(settings: dict[str, Any]) -> EngineConfig:
    """Return the settings of an engine in its caller's process. Raises `ConfigError`.

    As there are no other clients, the queue is limited only by memory. Nor is there a gateway,
    which would cache media: settings that ask for no cache of these are obeyed.
    """
    settings = {
        name: value for name, value in settings.items() if not _asks_for_no_media_cache(name, value)
    }
    extra: Any = settings.get("model_loader_extra_config")
    if hasattr(extra, "settings"):  # a `TensorizerConfig`
        settings = {**settings, "model_loader_extra_config": extra.settings()}
    elif isinstance(extra, dict):  # possibly from `dataclasses.asdict`
        extra = {name: value for name, value in extra.items() if value is not None}
        settings = {**settings, "model_loader_extra_config": extra}
    _warn_of_variables()
    return EngineConfig.from_mapping({"max_waiting": sys.maxsize, **settings})


def _asks_for_no_media_cache(name: str, value: Any) -> bool:
    if name == "mm_processor_cache_gb":
        return value == 0 and value is not False
    return name == "disable_mm_preprocessor_cache" and value is True


@cache
def _warn_of_variables() -> None:
    for sentence in unused_variables():
        log.warning("%s", sentence)


#: Settings that programs for vLLM compare with numbers, so that their default can't be None.
_SIZES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
_ours = [spec.name for spec in dataclasses.fields(EngineConfig)]
_names = [*_ours, *(foreign.name for foreign in VLLM_FLAGS if foreign.name not in _ours)]

if TYPE_CHECKING:

    class EngineArgs(_Methods):
        """The type of the dataclass below."""

        def __init__(self, model: str = "", **settings: Any) -> None: ...

else:
    EngineArgs = dataclasses.make_dataclass(
        "EngineArgs",
        [(name, Any, dataclasses.field(default=_SIZES.get(name))) for name in _names],
        bases=(_Methods,),
        namespace={"__doc__": "Settings of an engine, None where the default is meant."},
    )

AsyncEngineArgs = EngineArgs
