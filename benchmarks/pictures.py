"""Pictures a second of vision towers, beside OpenVINO and transformers: `python -m
benchmarks.pictures [--shape qwen2-vl] [--dtype int8] [--openvino-python PATH]`.

All have the same random weights, encode one picture after the other, and take turns, each in a
process of its own. OpenVINO compresses to int8 with `nncf`, so `--openvino-python` may name the
Python of an environment that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

TURNS, MIN_SECONDS = 5, 2.0
DTYPES = ("bfloat16", "int8")
_TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
#: 512 patches of a picture of 448 x 224 pixels.
_GRID = (1, 32, 16)


def _transformers() -> Any:
    """Imported where it is needed: few of its names have types."""
    import transformers

    return transformers


def write_siglip(folder: Path) -> None:
    """SigLIP-B/16's tower for pictures of 224 pixels."""
    tf = _transformers()
    text = _TEXT | {"num_attention_heads": 4, "projection_size": 768}
    config = tf.SiglipConfig(text_config=text, vision_config={"model_type": "siglip_vision_model"})
    tf.SiglipModel(config).save_pretrained(folder)


def write_qwen2_vl(folder: Path) -> None:
    """Four layers of Qwen2-VL's tower."""
    tf = _transformers()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    config = tf.Qwen2VLConfig(
        text_config=_TEXT | heads | {"rope_parameters": rope},
        vision_config={"depth": 4, "hidden_size": 64},
        image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    tf.Qwen2VLForConditionalGeneration(config).save_pretrained(folder)


def siglip_tensors() -> dict[str, Any]:
    """A picture as the tower takes it."""
    import torch

    return {"pixel_values": torch.randn(1, 3, 224, 224)}


def qwen2_vl_tensors() -> dict[str, Any]:
    """A picture as the tower takes it."""
    import torch

    frames, rows, columns = _GRID
    patches = torch.randn(frames * rows * columns, 3 * 2 * 14 * 14)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([_GRID])}


SHAPES = {
    "siglip-b16": (write_siglip, siglip_tensors),
    "qwen2-vl": (write_qwen2_vl, qwen2_vl_tensors),
}


def load_ours(folder: Path, tensors: dict[str, Any], dtype: str) -> Callable[[], Any]:
    """A function that encodes the picture."""
    import torch

    from engine import LLM

    quantized = {"quantization": "int8"} if dtype == "int8" else {}
    llm = LLM(
        str(folder), dtype="bfloat16", skip_tokenizer_init=True,
        num_gpu_blocks_override=16, **quantized,
    )  # fmt: skip
    torch.set_num_threads(1)  # as in a running engine, whose kernels have their own threads
    executor: Any = llm.llm_engine.core.executor
    model = executor.worker.loaded.model
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return lambda: model.encode("image", arrays)


def load_transformers(folder: Path, tensors: dict[str, Any], dtype: str) -> Callable[[], Any]:
    """A function that encodes the picture."""
    import torch

    tf = _transformers()
    kind = getattr(torch, dtype)
    encode = tf.AutoModel.from_pretrained(folder, dtype=kind).eval().get_image_features
    inputs = tensors | {"pixel_values": tensors["pixel_values"].to(kind)}

    def run() -> Any:
        with torch.inference_mode():
            return encode(**inputs)

    return run


def load_openvino(folder: Path, tensors: dict[str, Any], dtype: str) -> Callable[[], Any]:
    """A function that encodes the picture, in the precision that OpenVINO chooses."""
    import openvino
    import torch

    tf = _transformers()
    model = tf.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    other_tensors = {name: tensor for name, tensor in tensors.items() if name != "pixel_values"}
    pixels = tensors["pixel_values"]

    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            output = self.model.get_image_features(pixel_values=pixel_values, **other_tensors)
            vectors = getattr(output, "pooler_output", output)
            return vectors[0] if isinstance(vectors, tuple | list) else vectors

    with torch.inference_mode():
        converted = openvino.convert_model(Tower(), example_input=pixels)
    if dtype == "int8":
        import nncf

        converted = nncf.compress_weights(converted)
    else:
        openvino.save_model(converted, folder / "tower.xml", compress_to_fp16=True)
        converted = openvino.Core().read_model(folder / "tower.xml")
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": os.cpu_count()}
    compiled = openvino.Core().compile_model(converted, "CPU", hints)
    array = pixels.numpy()
    return lambda: compiled([array])


LOADERS = {"ours": load_ours, "transformers": load_transformers, "openvino": load_openvino}


def serve(name: str, folder: Path, shape: str, dtype: str) -> None:
    """Time pictures once for each line of stdin, and print seconds a picture."""
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(os.cpu_count() or 1)
    with contextlib.redirect_stdout(sys.stderr):  # nncf shows its progress
        run = LOADERS[name](folder, SHAPES[shape][1](), dtype)
    run()
    print("ready", flush=True)
    for _ in sys.stdin:
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < MIN_SECONDS:
            run()
            count += 1
        print((time.perf_counter() - started) / count, flush=True)


class Peer:
    """A process that encodes pictures when it is its turn."""

    def __init__(self, python: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.pictures", "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        self.seconds: list[float] = []
        self._answer(None)

    def _answer(self, line: str | None) -> str:
        """Write a line and read one, or only read one."""
        requests, answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        if line is not None:
            print(line, file=requests, flush=True)
        if not (answer := answers.readline()):
            raise SystemExit("A peer ended; its error is above.")
        return answer

    def run_turn(self) -> None:
        """Encode pictures for a while."""
        self.seconds.append(float(self._answer("go")))

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(shape: str, dtype: str, openvino_python: str) -> None:
    """Print a shape's rows."""
    with tempfile.TemporaryDirectory() as name:
        SHAPES[shape][0](Path(name))
        peers = {
            f"ours {dtype}": Peer(sys.executable, "ours", name, shape, dtype),
            f"OpenVINO {dtype}": Peer(openvino_python, "openvino", name, shape, dtype),
            "transformers float32": Peer(sys.executable, "transformers", name, shape, "float32"),
            "transformers bfloat16": Peer(sys.executable, "transformers", name, shape, "bfloat16"),
        }
        for _ in range(TURNS):
            for peer in peers.values():
                peer.run_turn()
        ours = next(iter(peers.values())).seconds
        for label, peer in peers.items():
            ratios = [theirs / mine for theirs, mine in zip(peer.seconds, ours, strict=True)]
            print(
                f"{shape:12} {label:24} {1 / statistics.median(peer.seconds):8.2f} pictures/s, "
                f"ours is {statistics.median(ratios):.2f} x as fast "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
            peer.end()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--openvino-python", default=sys.executable)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        name, folder, shape, dtype = arguments.serve
        serve(name, Path(folder), shape, dtype)
        return
    for dtype in arguments.dtype or DTYPES:
        for shape in arguments.shape or SHAPES:
            compare(shape, dtype, arguments.openvino_python)


if __name__ == "__main__":
    main()
