"""Questions about pictures: first tokens beside OpenVINO GenAI's VLM pipeline, and what a model
that sees costs those who ask about none.

    python -m benchmarks.pictures_serving write FOLDER
    optimum-cli export openvino -m FOLDER --task image-text-to-text --weight-format fp32 OPENVINO
    python -m benchmarks.pictures_serving first FOLDER --openvino OPENVINO --openvino-python PYTHON
    python -m benchmarks.pictures_serving idle FOLDER

`first` takes turns, each in a process of its own: the median of its questions about new pictures,
and of second questions about them. `idle` compares decode steps with those of the text part alone,
in turns. Both print JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np

DEMO = Path("demo/vision/model")
QUESTIONS = ("What is this?", "Where is it?")
PICTURES, TURNS = 6, 3
SIDE = 448


def write_model(folder: Path) -> None:
    """A random LLaVA: CLIP ViT-B with 256 patches, and a text part of 12 layers."""
    import torch

    tf = cast(Any, import_module("transformers"))
    tokens = tf.PreTrainedTokenizerFast.from_pretrained(DEMO)
    torch.manual_seed(0)
    vision = tf.CLIPVisionConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        image_size=224, patch_size=14,
    )  # fmt: skip
    text = tf.LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=len(tokens), max_position_embeddings=4096,
        tie_word_embeddings=True, pad_token_id=3, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    config = tf.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokens.convert_tokens_to_ids("<image>"),
        image_seq_length=256,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    tf.LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = tf.CLIPImageProcessorPil(
        size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}
    )
    template = (DEMO / "chat_template.jinja").read_text(encoding="utf-8")
    tf.LlavaProcessor(
        images, tokens, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=template,
    ).save_pretrained(folder)  # fmt: skip
    images.save_pretrained(folder)  # where OpenVINO looks for it


def pixels(number: int) -> np.ndarray:
    """A picture, uint8 [height, width, 3]."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)


def time_ours(args: argparse.Namespace) -> list[list[float]]:
    """Seconds to the first token of the first and of the second question, by picture."""
    from PIL import Image

    from engine import LLM, SamplingParams

    llm = LLM(str(args.model), dtype=args.dtype, disable_log_stats=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def ask(image: Image.Image, question: str) -> float:
        parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": question}]
        started = time.perf_counter()
        llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
        return time.perf_counter() - started

    return [
        [ask(Image.fromarray(pixels(number)), question) for question in QUESTIONS]
        for number in range(PICTURES + 1)
    ][1:]


#: Run by the Python of an environment with `openvino_genai`; a picture is answered twice.
_OPENVINO = """
import json, sys, time
import numpy as np, openvino as ov, openvino_genai as genai
folder, precision, count, side, questions = json.loads(sys.argv[1])
pipe = genai.VLMPipeline(folder, "CPU", INFERENCE_PRECISION_HINT=precision)
config = genai.GenerationConfig()
config.max_new_tokens, config.ignore_eos, config.do_sample = 1, True, False
rows = []
for number in range(count + 1):
    values = np.random.default_rng(number).integers(0, 255, (side, side, 3), dtype=np.uint8)
    row = []
    for question in questions:
        started = time.perf_counter()
        pipe.generate(question, images=[ov.Tensor(values[None])], generation_config=config)
        row.append(time.perf_counter() - started)
    rows.append(row)
print(json.dumps(rows[1:]))
"""


def time_openvino(args: argparse.Namespace) -> list[list[float]]:
    """The same of OpenVINO GenAI."""
    precision = {"float32": "f32", "bfloat16": "bf16"}[args.dtype]
    order = json.dumps([str(args.openvino), precision, PICTURES, SIDE, QUESTIONS])
    command = [args.openvino_python, "-c", _OPENVINO, order]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rows: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def compare_first(args: argparse.Namespace) -> dict[str, Any]:
    """Medians of each turn, in seconds, and ratios of the medians of all turns."""
    figures: dict[str, list[float]] = {"first": [], "second": [], "openvino": []}
    for _ in range(TURNS):
        command = [sys.executable, "-m", "benchmarks.pictures_serving", *sys.argv[1:], "--once"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        first, second = zip(*json.loads(done.stdout.splitlines()[-1]), strict=True)
        figures["first"].append(statistics.median(first))
        figures["second"].append(statistics.median(second))
        if args.openvino:
            theirs = [row[0] for row in time_openvino(args)]
            figures["openvino"].append(statistics.median(theirs))
    medians = {name: statistics.median(values) for name, values in figures.items() if values}
    ratios = {"second_over_first": medians["second"] / medians["first"]}
    if args.openvino:
        ratios["over_openvino"] = medians["first"] / medians["openvino"]
    return figures | ratios


def compare_idle(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a decode step of one text: of the model that sees, and of its text part."""
    import torch

    from engine import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        tf = cast(Any, import_module("transformers"))
        model = tf.LlavaForConditionalGeneration.from_pretrained(args.model, dtype=torch.float32)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.model / name, folder)
        text = model.config.text_config
        text.architectures = ["LlamaForCausalLM"]
        text.save_pretrained(folder)
        state = {
            f"model.{name}": value.contiguous()
            for name, value in model.model.language_model.state_dict().items()
        }
        from safetensors.torch import save_file

        save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        llms = {
            name: LLM(str(path), dtype=args.dtype, disable_log_stats=True)
            for name, path in (("sees", args.model), ("text", Path(folder)))
        }
        times: dict[str, list[float]] = {name: [] for name in llms}
        for turn in range(2 * args.turns + 1):
            for name, llm in llms.items():
                started = time.perf_counter()
                llm.generate("Tell me a story.", params, use_tqdm=False)
                if turn:
                    times[name].append(1e3 * (time.perf_counter() - started) / args.tokens)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["sees"], times["text"], strict=True)]
    return medians | {"ratio": statistics.median(ratios)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("write", "first", "idle"))
    parser.add_argument("model", type=Path, nargs="?", default=DEMO)
    parser.add_argument("--openvino", type=Path, help="the model as optimum exported it")
    parser.add_argument("--openvino-python", default=sys.executable)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, for `idle`")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "write":
        write_model(args.model)
        return
    if args.once:
        print(json.dumps(time_ours(args)))
        return
    run = {"first": compare_first, "idle": compare_idle}[args.what]
    print(json.dumps(run(args)))


if __name__ == "__main__":
    main()
