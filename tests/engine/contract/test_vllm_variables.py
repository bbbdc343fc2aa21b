"""vLLM's environment variables act by their counterparts, or say that they don't."""

from __future__ import annotations

import logging

import pytest

from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError
from engine.contract.plugins import is_selected
from engine.contract.vllm_variables import (
    VARIABLES,
    settings_from_variables,
    unused_variables,
    use_vllm_variables,
)
from engine.offline import engine_args


def test_settings_follow_variables_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    config = EngineConfig.from_mapping({"model": "m"})
    assert (config.attention_backend, config.cpu_kvcache_space) == ("TORCH_SDPA", 2.0)
    assert (config.batch_invariant, config.cpu_threads_bind) == (True, "0-1")
    other = EngineConfig.from_mapping({"model": "m", "attention_backend": "CPU_ATTN"})
    assert other.attention_backend == "CPU_ATTN"


def test_nothing_set_means_the_defaults() -> None:
    empty = {"VLLM_CPU_KVCACHE_SPACE": "0", "VLLM_ATTENTION_BACKEND": ""}
    assert settings_from_variables(empty) == {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "much", "must be a number of GiB; got 'much'"),
        ("VLLM_BATCH_INVARIANT", "yes", "must be 0 or 1; got 'yes'"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} {words}") as refused:
        settings_from_variables({name: value})
    assert refused.value.param == name


def test_variables_of_ours_follow_unless_they_are_set() -> None:
    environment = {
        "VLLM_API_KEY": "token-abc123",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "QUIRE_LOG_LEVEL": "ERROR",
        "VLLM_IMAGE_FETCH_TIMEOUT": "20",
        "VLLM_MEDIA_LOADING_THREAD_COUNT": "4",
    }
    use_vllm_variables(environment)
    assert environment["QUIRE_API_KEYS"] == "token-abc123"
    assert environment["QUIRE_LOG_LEVEL"] == "ERROR"
    assert environment["QUIRE_MEDIA_FETCH_TIMEOUT_S"] == "20"
    assert environment["QUIRE_MEDIA_FETCH_THREADS"] == "4"


def test_plugins_are_selected_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_PLUGINS", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "one, two")
    assert [is_selected(name) for name in ("one", "two", "three")] == [True, True, False]
    monkeypatch.setenv("QUIRE_PLUGINS", "three")
    assert [is_selected(name) for name in ("one", "three")] == [False, True]


def test_each_that_changes_nothing_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("VLLM_OF_TOMORROW", "1")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TORCH_SDPA")
    engine_args._warn_of_variables.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            engine_args.offline_config({"model": "m"})
    assert caplog.messages == [
        "VLLM_NO_USAGE_STATS changes nothing: no usage is ever sent anywhere.",
        "VLLM_OF_TOMORROW changes nothing.",
    ]


def test_every_counterpart_that_acts_is_a_setting() -> None:
    for variable in VARIABLES:
        if variable.acts:
            name = variable.counterpart
            setting = name.removeprefix("--").replace("-", "_")
            is_setting = name.startswith("QUIRE_") or setting in EngineConfig.__dataclass_fields__
            assert is_setting or name == variable.name  # a device reads it itself
        else:
            assert (
                variable.ours
                or unused_variables({variable.name: "1"})
                or (not variable.name.startswith("VLLM_"))
            )
