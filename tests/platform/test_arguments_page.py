"""docs/arguments.md is what the code says, and names every argument and variable of the manuals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from catalog.cli import NAMED
from common.settings_environment import NO_SETTINGS, variables
from config.management.commands.serve import Command
from config.management.commands.up import num_local_replicas
from engine.contract.vllm_variables import VARIABLES, Variable
from tests.engine.test_vllm_settings import MANUAL
from tools.docs.arguments_page import page

ROOT = Path(__file__).resolve().parents[2]
#: Of the server, from the same manual as the engine's.
SERVER = """
host port uvicorn-log-level allow-credentials allowed-origins allowed-methods allowed-headers
api-key lora-modules chat-template response-role ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs
root-path middleware
"""
#: Of newer manuals.
NEWER = """
attention-backend attention-config compilation-config api-server-count data-parallel-size
decode-context-parallel-size kv-cache-metrics-sample collect-detailed-traces
prefix-caching-hash-algo io-processor-plugin trust-request-chat-template
"""
#: Variables of all the manuals.
NAMES = """
VLLM_TARGET_DEVICE MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED VLLM_INSTALL_PUNICA_KERNELS
CMAKE_BUILD_TYPE VERBOSE VLLM_CONFIG_ROOT VLLM_HOST_IP VLLM_PORT VLLM_USE_MODELSCOPE
VLLM_INSTANCE_ID VLLM_RINGBUFFER_WARNING_INTERVAL CUDA_HOME VLLM_NCCL_SO_PATH LD_LIBRARY_PATH
VLLM_USE_TRITON_FLASH_ATTN LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_ENGINE_ITERATION_TIMEOUT_S
VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_USAGE_STATS_SERVER
VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING
VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_TRACE_FUNCTION VLLM_ATTENTION_BACKEND
VLLM_CPU_KVCACHE_SPACE VLLM_OPENVINO_KVCACHE_SPACE VLLM_OPENVINO_CPU_KV_CACHE_PRECISION
VLLM_OPENVINO_ENABLE_QUANTIZED_WEIGHTS VLLM_USE_RAY_COMPILED_DAG VLLM_WORKER_MULTIPROC_METHOD
VLLM_IMAGE_FETCH_TIMEOUT VLLM_XLA_CACHE_PATH VLLM_FUSED_MOE_CHUNK_SIZE VLLM_CPU_AVX512BF16
VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_ENABLE_V1_MULTIPROCESSING VLLM_LORA_RESOLVER_CACHE_DIR
VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_PLUGINS VLLM_USE_V1 VLLM_RAY_BUNDLE_INDICES
"""


def test_the_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs/arguments.md").read_text(encoding="utf-8") == page()


def test_it_names_every_argument_of_the_manuals() -> None:
    matches = set(re.findall(r"`--([a-z][a-z0-9-]+)`", page()))
    assert {*MANUAL, *SERVER.split(), *NEWER.split()} - matches == set()


def test_serve_takes_every_one_of_them() -> None:
    parser = Command().create_parser("quire", "serve")
    registered_texts = {text for action in parser._actions for text in action.option_strings}
    names = {f"--{name}" for name in [*MANUAL, *SERVER.split(), *NEWER.split()]}
    assert names - registered_texts == set()
    assert {f"--{name.replace('_', '-')}" for name in NAMED} <= registered_texts


def test_it_names_every_variable_of_the_manuals() -> None:
    assert set(NAMES.split()) - {variable.name for variable in VARIABLES} == set()
    assert all(variable.ours or variable.reason for variable in VARIABLES)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_each_counterpart_is_there(variable: Variable) -> None:
    parser = Command().create_parser("quire", "serve")
    flags = {text for action in parser._actions for text in action.option_strings}
    for word in filter(None, variable.ours.split(", ")):
        if word.startswith("--"):
            assert word in flags
        elif word != variable.name and not word.startswith("HF_"):
            assert word in {*variables(), *NO_SETTINGS}, f"{word} is read nowhere"


def test_data_parallel_engines_are_replicas() -> None:
    parser = Command().create_parser("quire", "serve")
    assert parser.parse_args(["--data-parallel-size", "2"]).replicas == 2
    assert parser.parse_args(["-dp", "3"]).replicas == 3


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("-dp 4", 4),
        ("-dp 4 --data-parallel-size-local 2 --data-parallel-hybrid-lb", 2),
        ("-dp 4 --data-parallel-rank 0", 1),
        ("-dp 4 --data-parallel-external-lb", 1),
    ],
)
def test_a_server_starts_the_engines_of_its_own_machine(line: str, count: int) -> None:
    options = Command().create_parser("quire", "serve").parse_args(line.split())
    assert num_local_replicas(vars(options)) == count
