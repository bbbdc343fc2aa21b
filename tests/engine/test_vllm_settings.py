"""vLLM's settings and command lines: each works, changes nothing, or is refused by a sentence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from engine.contract.command_line import expand_args
from engine.contract.engine_config import SETTINGS, EngineConfig, add_cli_args
from engine.contract.errors import ConfigError
from engine.contract.vllm_flags import BY_NAME, VLLM_FLAGS, VllmFlag
from engine.offline.engine_args import EngineArgs

#: The engine arguments of vLLM 0.5.1's manual, as its command line spells them.
_MANUAL = """
model tokenizer skip-tokenizer-init revision code-revision tokenizer-revision tokenizer-mode
trust-remote-code download-dir load-format dtype kv-cache-dtype quantization-param-path
max-model-len guided-decoding-backend distributed-executor-backend worker-use-ray
pipeline-parallel-size tensor-parallel-size max-parallel-loading-workers
ray-workers-use-nsight block-size enable-prefix-caching disable-sliding-window
use-v2-block-manager num-lookahead-slots seed swap-space gpu-memory-utilization
num-gpu-blocks-override max-num-batched-tokens max-num-seqs max-logprobs disable-log-stats
quantization rope-scaling rope-theta enforce-eager max-context-len-to-capture
max-seq-len-to-capture disable-custom-all-reduce tokenizer-pool-size tokenizer-pool-type
tokenizer-pool-extra-config enable-lora max-loras max-lora-rank lora-extra-vocab-size
lora-dtype long-lora-scaling-factors max-cpu-loras fully-sharded-loras device
scheduler-delay-factor enable-chunked-prefill speculative-model num-speculative-tokens
speculative-draft-tensor-parallel-size speculative-max-model-len
speculative-disable-by-batch-size ngram-prompt-lookup-max ngram-prompt-lookup-min
spec-decoding-acceptance-method typical-acceptance-sampler-posterior-threshold
typical-acceptance-sampler-posterior-alpha model-loader-extra-config preemption-mode
served-model-name qlora-adapter-name-or-path otlp-traces-endpoint engine-use-ray
disable-log-requests max-log-len
"""
MANUAL = _MANUAL.split()
#: What later versions have as arguments, as fields of --compilation-config (those of CUDA graphs),
#: or as variables: VLLM_BATCH_INVARIANT, VLLM_CPU_KVCACHE_SPACE, VLLM_CPU_OMP_THREADS_BIND.
_LATER = """
data_parallel_size nnodes node_rank master_addr master_port
additional_config async_scheduling attention_backend batch_invariant calculate_kv_scales
chat_template collect_detailed_traces convert decode_context_parallel_size
cpu_kvcache_space cpu_threads_bind cudagraph_capture_sizes cudagraph_mode ec_transfer_config
disable_hybrid_kv_cache_manager enable_expert_parallel enable_log_requests enable_prompt_embeds
enable_eplb enable_sleep_mode eplb_config
generation_config
hf_overrides io_processor_plugin kv_events_config kv_offloading_backend kv_offloading_size
kv_transfer_config
limit_mm_per_prompt logits_processors long_prefill_token_threshold mamba_ssm_cache_dtype
data_parallel_size media_io_kwargs mm_processor_kwargs model_impl video_pruning_rate
optimization_level override_generation_config pooler_config reasoning_parser runner
scheduling_policy speculative_config tool_call_parser
"""
LATER = set(_LATER.split())
#: What Quire alone has.
OUR_SETTINGS = {
    "cpu_kernels", "image_pruning_rate", "kept_seats_fraction", "max_waiting", "num_threads",
    "pipeline_layer_partition", "prefill_tokens_beside_decodes", "prompt_overtaking",
    "round_activations",
}  # fmt: skip
#: What the same manual gives as defaults, where they can be written down.
DEFAULTS: dict[str, Any] = {
    "tokenizer_mode": "auto",
    "guided_decoding_backend": "outlines",
    "worker_use_ray": False,
    "pipeline_parallel_size": 1,
    "tensor_parallel_size": 1,
    "use_v2_block_manager": False,
    "num_lookahead_slots": 0,
    "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": False,
    "tokenizer_pool_size": 0,
    "tokenizer_pool_type": "ray",
    "lora_extra_vocab_size": 256,
    "lora_dtype": "auto",
    "fully_sharded_loras": False,
    "scheduler_delay_factor": 0.0,
    "spec_decoding_acceptance_method": "rejection_sampler",
    "typical_acceptance_sampler_posterior_threshold": 0.09,
    "engine_use_ray": False,
    "disable_log_requests": False,
}
VALUES: dict[Any, Any] = {bool: True, int: 7, float: 7.5, str: "word", dict: {"a": 1}, list: ["a"]}


def parse(line: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return EngineConfig.from_cli_args(parser.parse_args(expand_args(line.split(), parser)))


def test_the_manuals_arguments_are_all_known() -> None:
    unknown = [name for name in MANUAL if name.replace("-", "_") not in SETTINGS | set(BY_NAME)]
    assert unknown == []
    assert len(MANUAL) == 73


def test_at_most_nine_settings_are_quires_own() -> None:
    """An operator who knows vLLM has no more than these to learn."""
    assert set(SETTINGS) - {name.replace("-", "_") for name in MANUAL} - LATER == OUR_SETTINGS
    assert len(OUR_SETTINGS) <= 9


def test_the_manuals_defaults_are_taken() -> None:
    assert EngineConfig.from_mapping(DEFAULTS) == EngineConfig()
    assert EngineConfig.from_mapping(dict.fromkeys(BY_NAME)) == EngineConfig()


@pytest.mark.parametrize("foreign", VLLM_FLAGS, ids=lambda foreign: foreign.name)
def test_each_changes_nothing_or_is_refused_in_words_of_its_own(foreign: VllmFlag) -> None:
    value = VALUES[foreign.kind]
    invalid = "x" if foreign.kind is not str else 5
    if foreign.name in SETTINGS:
        pytest.skip("is a setting of ours by now")
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.from_mapping({foreign.name: invalid})
    assert refusal.value.param == foreign.name
    if foreign.becomes is not None:
        return
    if foreign.takes is None:
        assert EngineConfig.from_mapping({foreign.name: value}) == EngineConfig()
        return
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.from_mapping({foreign.name: value})
    assert refusal.value.param == foreign.name
    assert refusal.value.message.startswith(f"{foreign.name}={value!r} can't be used: ")
    assert refusal.value.message.endswith((".", "`"))
    for accepted in foreign.takes:
        assert EngineConfig.from_mapping({foreign.name: accepted}) == EngineConfig()


@pytest.mark.parametrize(
    ("engine_settings", "ours"),
    [
        ({"task": "embed"}, {"runner": "pooling", "convert": "embed"}),
        ({"attention_config": {"backend": "CPU"}}, {"attention_backend": "CPU"}),
        ({"attention_config": {"flash_attn_version": 3, "use_trtllm_attention": 0}}, {}),
        ({"compilation_config": {"splitting_ops": None}}, {}),
        (
            {"compilation_config": {"mode": 1, "cudagraph_mode": "NONE"}},
            {"optimization_level": 1, "cudagraph_mode": "NONE"},
        ),
        ({"kv_cache_memory_bytes": 2**31}, {"cpu_kvcache_space": 2.0}),
        (
            {"override_pooler_config": {"pooling_type": "CLS"}},
            {"pooler_config": {"pooling_type": "CLS"}},
        ),
        ({"max-num-seqs": 4}, {"max_num_seqs": 4}),
    ],
)
def test_some_stand_for_settings_of_ours(
    engine_settings: dict[str, Any], ours: dict[str, Any]
) -> None:
    assert EngineConfig.from_mapping(engine_settings) == EngineConfig(**ours)


def test_no_cache_of_media_is_what_an_engine_without_a_gateway_has() -> None:
    without = EngineArgs("m").create_engine_config()
    for value in (0, 0.0):
        args = EngineArgs("m", mm_processor_cache_gb=value, disable_mm_preprocessor_cache=True)
        assert args.create_engine_config() == without


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mm_processor_cache_gb", 8, "set QUIRE_MEDIA_CACHE_BYTES"),
        ("mm_processor_cache_gb", False, "must be float"),
        ("disable_mm_preprocessor_cache", 1, "must be bool"),
    ],
)
def test_another_cache_of_media_is_refused_offline(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        EngineArgs("m", **{name: value}).create_engine_config()
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("engine_settings", "param"),
    [
        ({"task": "fly"}, "task"),
        ({"compilation_config": {"use_inductor": True}}, "compilation_config"),
        ({"task": "embed", "runner": "generate"}, "runner"),
        ({"nonsense": 1}, "nonsense"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size"),
        ({"prefix_caching_hash_algo": "xxhash"}, "prefix_caching_hash_algo"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens"),
        ({"speculative_disable_by_batch_size": 4}, "speculative_disable_by_batch_size"),
    ],
)
def test_what_cant_be_meant_is_refused_by_name(engine_settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.from_mapping(engine_settings)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("setting", "field", "value", "reason"),
    [
        ("attention_config", "flash_attn_version", 2, "FlashAttention 3"),
        ("attention_config", "use_trtllm_attention", True, "FlashInfer's own kernels"),
        ("attention_config", "use_cudnn_prefill", False, "attention_config.backend"),
        ("compilation_config", "splitting_ops", [], "cudagraph_mode"),
        ("compilation_config", "debug_dump_path", "/tmp/dump", "start_profile"),
        ("compilation_config", "use_inductor_graph_partition", True, "cudagraph_mode"),
    ],
)
def test_a_field_of_a_configuration_is_refused_with_its_own_reason(
    setting: str, field: str, value: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason) as refusal:
        EngineConfig.from_mapping({setting: {field: value}})
    assert refusal.value.message.startswith(f"{setting}.{field}")


@pytest.mark.parametrize(
    ("line", "engine_settings"),
    [
        ("--max_num_seqs 4 --max_model_len=64", {"max_num_seqs": 4, "max_model_len": 64}),
        ("-tp 1 -pp 1 -q int8 -O1", {"quantization": "int8", "optimization_level": 1}),
        ("--swap-space 0 --enable-lora --disable-log-requests", {}),
        ("-q None -spec-draft-tp 1", {}),
        ("--served-model-name first second --seed 3", {"served_model_name": "first", "seed": 3}),
        (
            "--max-model-len 2K --max-num-batched-tokens 25.6k",
            {
                "max_model_len": 2048,
                "max_num_batched_tokens": 25600,
            },
        ),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--attention-config.backend CPU", {"attention_backend": "CPU"}),
        ("-ac.backend CPU", {"attention_backend": "CPU"}),
        (
            "--compilation_config.cudagraph_mode NONE --compilation-config.mode=2",
            {"cudagraph_mode": "NONE", "optimization_level": 2},
        ),
        ("-O.mode=3", {"optimization_level": 3}),
        ("-O.mode 3", {"optimization_level": 3}),
        ('-O {"mode":3}', {"optimization_level": 3}),
        ('-O={"level":3}', {"optimization_level": 3}),
        ("-O=3", {"optimization_level": 3}),
        (
            "-O.cudagraph_mode NONE --compilation-config.mode=1",
            {"cudagraph_mode": "NONE", "optimization_level": 1},
        ),
        (
            "--hf-overrides.rope_theta 5 --hf-overrides.a.b x",
            {"hf_overrides": {"rope_theta": 5, "a": {"b": "x"}}},
        ),
    ],
)
def test_command_lines_as_vllm_takes_them(line: str, engine_settings: dict[str, Any]) -> None:
    assert parse(line) == EngineConfig(**engine_settings)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-q qqq", "qqq can't be used: take the GPTQ or the"),
        ("-q experts_int8", "experts_int8 can't be used: it rounds plain weights"),
        ("--load-format foo", "invalid choice: 'foo'"),
        ("--max-num-seqs 1.5K", "'1.5K' is no whole number"),
        ("--max-num-seqs 1.5", "'1.5' is no whole number"),
        ("--max-num-seqs k", "'k' is no whole number"),
    ],
)
def test_a_word_that_is_something_else_here_says_what_to_take(
    line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(line)
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_file_of_settings_comes_before_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "engine_settings.yaml"
    file.write_text(
        "max_num_seqs: 8\nmax-model-len: 64\nenable-prefix-caching: false\n"
        'hf_overrides: {"rope_theta": 5}\ncudagraph-capture-sizes: [1, 2]\ndtype:\n'
    )
    config = parse(f"--max-num-seqs 4 --config {file}")
    assert config == EngineConfig(
        max_num_seqs=4,
        max_model_len=64,
        enable_prefix_caching=False,
        hf_overrides={"rope_theta": 5},
        cudagraph_capture_sizes=[1, 2],
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_num_seq", "max-num-seqs"), ("max-num-s", "max-num-seqs"), ("nothing_like_it", "")],
)
def test_a_name_in_the_file_that_is_no_setting_is_refused(
    tmp_path: Path, name: str, meant: str
) -> None:
    """argparse alone would take the beginning of one for it."""
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: 4\n")
    with pytest.raises(ConfigError, match=name) as refusal:
        parse(f"--config {file}")
    assert refusal.value.param == name
    assert (f"Did you mean {meant}" in refusal.value.message) is bool(meant)


@pytest.mark.parametrize("line", [["M", "--x", "1"], ["--x", "1", "M"], ["M"]])
def test_a_list_in_the_file_takes_no_words_of_the_command_line(
    tmp_path: Path, line: list[str]
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("none: []\nnames: [a, b]\n")
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--none", nargs="+")
    parser.add_argument("--x")
    options = parser.parse_args(expand_args([*line, "--config", str(file)]))
    assert (options.model, options.names, options.none) == ("M", ["a", "b"], None)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [", "5: 6\n", None])
def test_a_file_that_holds_no_settings_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "settings.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        expand_args(["--config", str(file)])
    assert refusal.value.param == "config"
    with pytest.raises(ConfigError):
        expand_args(["--config"])


def test_what_is_no_flag_stays_as_it_is() -> None:
    words = ["a_b", "--x", "-1.5", "--", "--c_d", "--config"]
    assert expand_args(words) == words


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--enable-chunked-prefill True", True),
        ("--enable_chunked_prefill false", False),
        ("--enable-chunked-prefill=TRUE", True),
        ("--no-enable-chunked-prefill true", False),
        ("--no-enable-chunked-prefill=false", True),
        ("--disable-chunked-prefill", False),
        ("--disable-chunked-prefill False", True),
        ("--no-disable-chunked-prefill", True),
    ],
)
def test_a_switch_may_have_a_value_or_be_turned_round(line: str, value: bool) -> None:
    assert parse(line).enable_chunked_prefill is value
    assert parse(f"{line} --max-num-seqs 4").max_num_seqs == 4


@pytest.mark.parametrize("flag", ["--enable-prefix-caching", "--enforce-eager"])
def test_a_switchs_value_is_true_or_false(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} is true or false, got 'perhaps'"):
        parse(f"{flag}=perhaps")


def test_each_switch_of_vllms_takes_a_value() -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    for foreign in [foreign for foreign in VLLM_FLAGS if foreign.kind is bool]:
        flag = "--" + foreign.name.replace("_", "-")
        for text, value in (("True", True), ("false", False)):
            read = parser.parse_args(expand_args([flag, text], parser))
            assert getattr(read, foreign.name) is value, flag


@pytest.mark.parametrize("name", ["AWQ", "Gptq", "FP8"])
def test_a_method_of_quantization_is_known_in_any_case(name: str) -> None:
    assert EngineConfig.from_mapping({"quantization": name}).quantization == name.lower()


def test_the_command_line_knows_methods_in_capitals_too() -> None:
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    assert parser.parse_args(["--quantization", "AWQ"]).quantization == "awq"
