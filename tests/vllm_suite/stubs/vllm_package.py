"""Stands in for the package `vllm`: anything can be imported, a few helpers of tests work, and
what is called besides skips its test, because it tests vLLM's insides and no server.

Copied into the tree that the tests run in, as `vllm/__init__.py`.
"""

from __future__ import annotations

import base64
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODEL = os.environ["QUIRE_SUITE_MODEL"]
#: What vLLM brings along. It's stood in for where it isn't installed.
BROUGHT = (
    *("fastapi", "mcp", "openai_harmony", "starlette", "mistral_common", "cachetools", "PIL"),
    "rapidfuzz",
)
#: Modules of vLLM that tests read answers with: they're taken from its source as they are.
REAL = ("vllm.utils.serial_utils", "vllm.entrypoints.pooling.utils")
#: Of vLLM's tests: what runs a model beside the server, and lists of models.
OF_TESTS = ("tests.conftest", "tests.ci_envs", "tests.models.registry")


class _Base:
    """What a class of vLLM's is to classes derived from it. Making one skips."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pytest.skip("needs vLLM itself: a class derived from one of its own")


class Missing:
    """Something of vLLM's. Using it skips."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return resolve_path(f"{self._path}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.skip(f"needs vLLM itself: {self._path}", allow_module_level=True)

    def __or__(self, _: Any) -> Missing:
        return self

    __ror__ = __getitem__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (_Base,)


class _Platform:
    """No accelerator of any kind."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


class ModelConfig:
    """Of the model that the suite runs with, whatever the test calls it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        text = (Path(MODEL) / "config.json").read_text(encoding="utf-8")
        self.config = json.loads(text)

    def get_vocab_size(self) -> int:
        """Entries of the vocabulary."""
        return int(self.config["vocab_size"])


def get_tokenizer(*_: Any, **__: Any) -> Any:
    """The served model's tokenizer, from the library that vLLM takes it from."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


class _Object(SimpleNamespace):
    """An object of an answer."""

    def model_dump(self, *, exclude: Any = (), **_: Any) -> dict[str, Any]:
        """Its fields."""
        return {name: value for name, value in vars(self).items() if name not in exclude}


class Answer:
    """What a server answers, by attributes: stands in for vLLM's models of its responses."""

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        """The same value; objects become objects with attributes."""
        if isinstance(value, list):
            return [cls.model_validate(item) for item in value]
        if not isinstance(value, dict):
            return value
        of = {name: cls.model_validate(validated) for name, validated in value.items()}
        return _Object(**of)


class _Hub:
    """The hub: whatever adapter is asked for, it's one of the demo model's."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        """A folder."""
        return str(Path(MODEL).parent / "adapters" / "pirate")


class _Flags(ModuleType):
    """`vllm.envs`: nothing is switched on."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


EXCEPTIONS: dict[str, Any] = {
    "vllm.tokenizers.get_tokenizer": get_tokenizer,
    "vllm.transformers_utils.tokenizer.get_tokenizer": get_tokenizer,
    "vllm.platforms.current_platform": _Platform(),
    "vllm.config.ModelConfig": ModelConfig,
    "vllm.version.__version__": os.environ["QUIRE_SUITE_VERSION"],
    "vllm.transformers_utils.repo_utils.hf_api": _Hub,
    "vllm.envs": _Flags("vllm.envs"),
    "vllm.logger.init_logger": logging.getLogger,
}


def resolve_path(path: str) -> Any:
    """What stands at a dotted path."""
    if path in EXCEPTIONS:
        return EXCEPTIONS[path]
    if path.endswith(("Error", "Exception")):
        EXCEPTIONS[path] = type(path.rpartition(".")[2], (Exception,), {})
        return EXCEPTIONS[path]
    if path.endswith("Response"):
        return Answer
    return Missing(path)


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        if path in EXCEPTIONS:
            return EXCEPTIONS[path]
        if name.startswith("__"):
            raise AttributeError(name)
        return resolve_path(path)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module below these packages is there, and these very modules."""

    def __init__(self, *roots: str) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not {name, name.partition(".")[0]} & set(self._roots) or name == "vllm":
            return None
        source = Path(os.environ.get("QUIRE_SUITE_SOURCE", ""), *name.split("."))
        if name in REAL and source.with_suffix(".py").is_file():
            return importlib.util.spec_from_file_location(name, source.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        exception = EXCEPTIONS.get(spec.name)
        return exception if isinstance(exception, ModuleType) else _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        return None


sys.meta_path.insert(0, _Finder("vllm"))
sys.meta_path.append(_Finder(*BROUGHT, *OF_TESTS))
try:
    importlib.import_module("pybase64")
except ModuleNotFoundError:
    sys.modules["pybase64"] = base64
envs = EXCEPTIONS["vllm.envs"]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return resolve_path(f"vllm.{name}")
