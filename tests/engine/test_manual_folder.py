"""The example scripts of vLLM's manual, run with `engine` for `vllm` and nothing else changed.

They aren't in the repository: QUIRE_TEST_MANUAL names a folder with them, a file each, by the names
that they have in vLLM's repository. The hub, which has small weights under the real names, and the
server's port stand in for the world.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModel

from tests.engine.checkpoints.folders import make_pair
from tests.engine.checkpoints.writers import aqlm, awq, gptq
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.models import make_model, make_tokenizer
from tests.engine.speculative import head_folders
from tests.fakes.hub import Hub
from tests.platform.instance import Instance, environment, internal
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

MANUAL = os.environ.get("QUIRE_TEST_MANUAL")
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not MANUAL, reason="QUIRE_TEST_MANUAL names no folder with the scripts"),
]
ROOT = Path(__file__).resolve().parents[2]
#: Stands in for Gradio: calls the function once, as a visitor's first message would.
GRADIO = """
import inspect

class _Page:
    def __init__(self, function=None, **_): self.function = function
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def queue(self): return self
    def submit(self, function, *_): _Page.submitted = function
    def launch(self, **_):
        function = self.function or _Page.submitted
        words = ("Hello", []) if self.function else ("Hello",)
        *_, last = function(*words)
        print("answered:", repr(last))

ChatInterface = Blocks = Textbox = _Page
def Markdown(text): pass
"""


@dataclass(frozen=True)
class Script:
    """One of them: its arguments, and what it prints at the end, or the sentence it ends with."""

    name: str
    words: tuple[str, ...] = ()
    prints: str = ""
    ends: str = ""


OFFLINE = "Prompt: 'The future of AI is', Generated text: "
#: The small weights have no part that sees.
NO_PICTURES = r"engine\.contract\.errors\.\w+: "
SCRIPTS = (
    Script("api_client", ("--port", "PORT"), prints="Beam candidate 3: 'San Francisco is a"),
    Script("api_client", ("--port", "PORT", "--stream"), prints="Beam candidate 3: "),
    Script("aqlm_example", ("--choice", "4")),
    Script("gradio_openai_chatbot_webserver", ("-m", "facebook/opt-125m"), prints="answered: "),
    Script("gradio_webserver", prints="answered: 'Hello"),
    Script("llava_example", ends=NO_PICTURES),
    Script("llava_next_example", ends=NO_PICTURES),
    Script("llm_engine_example", ("--model", "facebook/opt-125m"), prints="RequestOutput("),
    Script("lora_with_quantization_inference", ends="qlora_adapter_name_or_path|bitsandbytes"),
    Script("multilora_inference", prints="RequestOutput("),
    Script("offline_inference", prints=OFFLINE),
    Script("offline_inference_arctic", ends="deepspeedfp|tensor_parallel_size=8"),
    Script("offline_inference_distributed", ends="No module named 'ray'"),
    Script("offline_inference_embedding", prints="["),
    Script("offline_inference_mlpspeculator", prints="With speculation"),
    Script("offline_inference_neuron", ends="neuron|tensor_parallel_size=2"),
    Script("offline_inference_with_prefix", prints="Generated answers are the same: True"),
    Script("openai_chat_completion_client", prints="ChatCompletion("),
    Script("openai_completion_client", prints="Completion("),
    Script("openai_embedding_client", prints="["),
    Script("openai_vision_api_client", ends="image_url"),
    Script("phi3v_example", ends=NO_PICTURES),
    Script("save_sharded_state", ("--model", "FOLDER", "--output", "sharded")),
    Script(
        "tensorize_vllm_model",
        (
            *("--model", "facebook/opt-125m", "serialize"),
            *("--serialized-directory", "tensors", "--suffix", "v1"),
        ),
    ),
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    opt = folder / "opt"
    make_checkpoint({**RECIPES["opt"], "vocab_size": 384, "max_position_embeddings": 2048}, opt)
    make_tokenizer().save_pretrained(opt)
    llama = make_model("llama", folder / "llama")
    quantized = {
        method: make_pair(llama, folder / method, config, writer).packed
        for method, config, writer in (
            ("awq", {**AWQ, "version": "gemm"}, awq()),
            ("gptq", GPTQ, gptq()),
            ("aqlm", AQLM, aqlm),
        )
    }
    pictures = {}
    for kind, architecture in (
        ("llava", "LlavaForConditionalGeneration"),
        ("llava_next", "LlavaNextForConditionalGeneration"),
        ("phi3_v", "Phi3VForCausalLM"),
    ):
        pictures[kind] = shutil.copytree(llama, folder / kind)
        config = {"model_type": kind, "architectures": [architecture]}
        (pictures[kind] / "config.json").write_text(json.dumps(config))
    # A token of the adapter's example is the 32,004th.
    large = make_model("llama", folder / "large", vocab_size=32_016)
    embedder = make_model("mistral", folder / "embedder")
    AutoModel.from_pretrained(embedder).save_pretrained(embedder)
    adapter = make_adapter(llama, folder / "adapter")
    others = {
        "intfloat/e5-mistral-7b-instruct": embedder,
        "meta-llama/Llama-2-7b-hf": large,
        "meta-llama/Llama-2-7b-chat-hf": llama,
        "meta-llama/Llama-2-13b-chat-hf": llama,
        "huggyllama/llama-7b": llama,
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0": llama,
        "snowflake/snowflake-arctic-instruct": llama,
        "BlackSamorez/TinyLlama-1.1B-Chat-v1.0-AQLM-2Bit-1x16-hf": quantized["aqlm"],
        "TheBloke/TinyLlama-1.1B-Chat-v0.3-AWQ": quantized["awq"],
        "TheBloke/TinyLlama-1.1B-Chat-v0.3-GPTQ": quantized["gptq"],
        "ibm-fms/llama-13b-accelerator": head_folders.write(
            folder / "heads", *head_folders.mlp_parts()
        ),
        "llava-hf/llava-1.5-7b-hf": pictures["llava"],
        "llava-hf/llava-v1.6-mistral-7b-hf": pictures["llava_next"],
        "microsoft/Phi-3-vision-128k-instruct": pictures["phi3_v"],
        "timdettmers/qlora-flan-7b": adapter,
        "jashing/tinyllama-colorist-lora": adapter,
        "yard1/llama-2-7b-sql-lora-test": make_adapter(large, folder / "sql"),
    }
    with Hub("facebook/opt-125m", opt, others=others) as hub:
        yield hub


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AQLM = {
    "quant_method": "aqlm",
    "in_group_size": 8,
    "out_group_size": 1,
    "num_codebooks": 2,
    "nbits_per_codebook": 8,
}


@pytest.fixture(scope="module")
def world(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of all programs."""
    folder = tmp_path_factory.mktemp("world")
    modules, programs = folder / "modules", folder / "bin"
    modules.mkdir()
    programs.mkdir()
    (modules / "gradio.py").write_text(GRADIO)
    (programs / "aws").write_text("#!/bin/sh\n")
    (programs / "aws").chmod(0o755)
    ours = environment(folder, **internal(engine_command=[]))
    del ours["QUIRE_DATA_DIR"]
    return {
        **ours,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(modules)]),
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "VLLM_CPU_KVCACHE_SPACE": "0.05",
    }


@pytest.fixture(scope="module")
def port(world: dict[str, str], short_tmp: Path) -> Iterator[str]:
    """Of `quire serve facebook/opt-125m`."""
    words = ("facebook/opt-125m", "--chat-template", "{{ messages[0]['content'] }}", "--no-worker")
    with Instance(short_tmp / "manual", *words, command="serve", **world) as instance:
        yield instance.ready()["url"].rpartition(":")[2]


@pytest.fixture(scope="module")
def pooling_port(world: dict[str, str], short_tmp: Path) -> Iterator[str]:
    """Of a server of the model that the script of embeddings is about."""
    words = ("intfloat/e5-mistral-7b-instruct", "--no-worker")
    with Instance(short_tmp / "pooling", *words, command="serve", **world) as instance:
        yield instance.ready()["url"].rpartition(":")[2]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_of_the_manual(
    script: Script, world: dict[str, str], hub: Hub, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = re.compile(rf"(\d+_)?{script.name}\.py")
    (path,) = [path for path in Path(str(MANUAL)).iterdir() if name.fullmatch(path.name)]
    source = re.sub(r"(?<=from )vllm\b", "engine", path.read_text())
    if "localhost" in source:
        port = request.getfixturevalue("pooling_port" if "embeddings" in source else "port")
        source = source.replace("localhost:8000", f"localhost:{port}")
        world = world | {"PORT": port}
    program = tmp_path / "program.py"
    program.write_text(source)
    values = {"PORT": world.get("PORT", ""), "FOLDER": str(hub.folders["meta-llama/Llama-2-7b-hf"])}
    done = subprocess.run(
        [sys.executable, str(program), *(values.get(word, word) for word in script.words)],
        cwd=tmp_path,
        env=world,
        capture_output=True,
        text=True,
        check=False,
    )
    if script.ends:
        assert done.returncode != 0, done.stdout
        assert re.search(script.ends, done.stderr), done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert script.prints in done.stdout
