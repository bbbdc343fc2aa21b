"""Small weights under the names of the texts, on a hub, and an environment of their programs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from transformers import AutoModel

from tests.engine.checkpoints.folders import make_pair
from tests.engine.checkpoints.writers import aqlm, awq, gptq
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.models import make_model, make_tokenizer
from tests.engine.multimodal import models as vision_models
from tests.engine.speculative import head_folders
from tests.fakes.hub import Hub
from tests.platform.instance import environment, internal
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

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
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "zero_point": True,
    "version": "gemm",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AQLM = {
    "quant_method": "aqlm",
    "in_group_size": 8,
    "out_group_size": 1,
    "num_codebooks": 2,
    "nbits_per_codebook": 8,
}


def make_hub(folder: Path) -> Hub:
    """A hub of all models and adapters that the texts name."""
    opt = folder / "opt"
    make_checkpoint({**RECIPES["opt"], "vocab_size": 384, "max_position_embeddings": 2048}, opt)
    make_tokenizer().save_pretrained(opt)
    llama = make_model("llama", folder / "llama", max_position_embeddings=2048)
    awq_model, gptq_model, aqlm_model = (
        make_pair(llama, folder / str(config["quant_method"]), config, writer).packed
        for config, writer in ((AWQ, awq()), (GPTQ, gptq()), (AQLM, aqlm))
    )
    # A token of the adapter's example is the 32,004th.
    large = make_model("llama", folder / "large", vocab_size=32_016, max_position_embeddings=2048)
    embedder = make_model("mistral", folder / "embedder")
    AutoModel.from_pretrained(embedder).save_pretrained(embedder)
    adapter = make_adapter(llama, folder / "adapter")
    phi3v = folder / "phi3v"
    vision_models.phi3_vision(phi3v, max_position_embeddings=4096)
    vision_models.llava(folder / "llava")
    vision_models.llava_next(folder / "llava_next")
    _set_context(folder / "llava_next", 4096)
    llamas = (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "huggyllama/llama-7b",
        "lmsys/vicuna-7b-v1.5",
        "meta-llama/Llama-2-13b-chat-hf",
        "meta-llama/Llama-2-7b-chat-hf",
        "meta-llama/Llama-3-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3-8B-Instruct",
        "meta-llama/llama-2-7b-hf",
        "mistralai/Mistral-7B-Instruct-v0.1",
        "mosaicml/mpt-7b",
        "NousResearch/Llama-2-7b-chat-hf",
        "NousResearch/Meta-Llama-3-8B-Instruct",
        "Qwen/Qwen3-0.6B",
        "RedHatAI/Llama-3.2-1B-FP8",
        "snowflake/snowflake-arctic-instruct",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    )
    other_folders = {
        **dict.fromkeys(llamas, llama),
        "BlackSamorez/TinyLlama-1.1B-Chat-v1.0-AQLM-2Bit-1x16-hf": aqlm_model,
        "facebook/opt-13b": opt,
        "facebook/opt-6.7b": opt,
        "ibm-fms/llama-13b-accelerator": head_folders.write(
            folder / "heads", *head_folders.mlp_parts()
        ),
        "intfloat/e5-mistral-7b-instruct": embedder,
        "jashing/tinyllama-colorist-lora": adapter,
        "llava-hf/llava-1.5-7b-hf": folder / "llava",
        "llava-hf/llava-v1.6-mistral-7b-hf": folder / "llava_next",
        "meta-llama/Llama-2-7b-hf": large,
        "microsoft/Phi-3-vision-128k-instruct": phi3v,
        "TheBloke/Llama-2-7b-Chat-AWQ": awq_model,
        "TheBloke/TinyLlama-1.1B-Chat-v0.3-AWQ": awq_model,
        "TheBloke/TinyLlama-1.1B-Chat-v0.3-GPTQ": gptq_model,
        "timdettmers/qlora-flan-7b": adapter,
        "yard1/llama-2-7b-sql-lora-test": make_adapter(large, folder / "sql"),
    }
    return Hub("facebook/opt-125m", opt, other_folders=other_folders)


def _set_context(folder: Path, length: int) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = length
    path.write_text(json.dumps(config))


def make_environment(folder: Path, hub: Hub) -> dict[str, str]:
    """Variables of programs that run in `folder`, with the files that the texts presume there."""
    modules, programs = folder / "modules", folder / "bin"
    for path in (modules, programs, folder / "images"):
        path.mkdir(parents=True)
    (modules / "gradio.py").write_text(GRADIO)
    for name, command in (
        ("aws", ""),
        ("quire", f'exec {sys.executable} -m quire "$@"\n'),
        ("python", f'exec {sys.executable} "$@"\n'),
        ("python3", f'exec {sys.executable} "$@"\n'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{command}")
        (programs / name).chmod(0o755)
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name in ("stop_sign", "cherry_blossom"):
        Image.new("RGB", (56, 56), "red").save(folder / "images" / f"{name}.jpg")
    adapter = make_adapter(hub.folder, folder / "adapters" / "my_sql_adapter")
    path = adapter / "adapter_config.json"
    config = {**json.loads(path.read_text()), "base_model_name_or_path": "facebook/opt-125m"}
    path.write_text(json.dumps(config))
    variables = environment(folder / "data", **internal(engine_command=[]))
    del variables["QUIRE_DATA_DIR"]
    # Kernels that were compiled before: each start would compile them for a home of its own.
    cache = os.environ.get("QUIRE_CACHE_DIR") or str(Path.home() / ".cache" / "quire")
    return {
        **variables,
        "QUIRE_CACHE_DIR": cache,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / ".cache" / "huggingface"),
        "HF_HUB_DISABLE_XET": "1",
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(modules)]),
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "VLLM_CPU_KVCACHE_SPACE": "0.05",
    }
