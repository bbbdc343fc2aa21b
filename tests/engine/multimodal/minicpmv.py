"""A tiny MiniCPM-V 2.6: `transformers`' SigLIP layers and Qwen 2, torch's attention, and what lies
between them by its public description, patch by patch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import save_file
from torch import nn

QUERIES, MAX_SLICES, RESOLUTION, PATCH, TABLE_SIDE = 4, 5, 28, 7, 8
SIZE = 128  # of the text: a head of the resampler
TOKENS = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<unk>")


class MiniCPMV:
    """Generates as `transformers`' models do."""

    config = SimpleNamespace(model_type="minicpmv")

    def __init__(self, text: Any, tower: Any, unknown: int) -> None:
        hidden, self.unknown = tower.config.hidden_size, unknown
        self.text, self.tower = text, tower
        self.query, self.projection = torch.randn(QUERIES, SIZE), torch.randn(SIZE, SIZE) * 0.1
        self.parts = nn.ModuleDict(
            {
                "kv_proj": nn.Linear(hidden, SIZE, bias=False),
                "attn": nn.MultiheadAttention(SIZE, SIZE // 128, batch_first=True),
                **{name: nn.LayerNorm(SIZE, eps=1e-6) for name in ("ln_q", "ln_kv", "ln_post")},
            }
        ).eval()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By the names of a checkpoint."""
        tower = {
            f"vpm.{name.removeprefix('vision_model.')}": tensor
            for name, tensor in self.tower.state_dict().items()
        }
        state = {f"llm.{name}": tensor for name, tensor in self.text.state_dict().items()}
        state |= {f"resampler.{name}": tensor for name, tensor in self.parts.state_dict().items()}
        state |= tower | {"resampler.query": self.query, "resampler.proj": self.projection}
        return {name: tensor.detach().contiguous() for name, tensor in state.items()}

    def vectors(self, pixels: torch.Tensor) -> torch.Tensor:
        """[QUERIES, SIZE] of a slice, float32 [3, height, width]."""
        model = getattr(self.tower, "vision_model", self.tower)
        rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
        x = model.embeddings.patch_embedding(pixels[None]).flatten(2).transpose(1, 2)
        table = model.embeddings.position_embedding.weight
        where = [(row, column) for row in range(rows) for column in range(columns)]
        index = [
            _bucket(row, rows) * TABLE_SIDE + _bucket(column, columns) for row, column in where
        ]
        states = model.encoder(inputs_embeds=x + table[index]).last_hidden_state
        parts: Any = self.parts
        values = parts["ln_kv"](parts["kv_proj"](model.post_layernorm(states)))
        keys = values + torch.stack([_sines(row, column) for row, column in where])
        queries = parts["ln_q"](self.query)[None]
        attended, _ = parts["attn"](queries, keys, values)
        return (parts["ln_post"](attended) @ self.projection)[0]

    def generate(self, input_ids: torch.Tensor, slices: Any = (), **options: Any) -> torch.Tensor:
        """int64 [1, tokens]: the prompt and what follows."""
        embeds = self.text.get_input_embeddings()(input_ids).clone()
        if slices:
            embeds[input_ids == self.unknown] = torch.cat([self.vectors(one) for one in slices])
        new = self.text.generate(
            inputs_embeds=embeds, attention_mask=torch.ones_like(input_ids), **options
        )
        return torch.cat((input_ids, new), dim=1)


def _bucket(index: int, count: int) -> int:
    """The table's row for row `index` of `count`."""
    boundaries = torch.arange(1 / TABLE_SIDE, 1.0, 1 / TABLE_SIDE)
    position = torch.arange(0, 1 - 1e-6, 1 / count)[index]
    return int((boundaries <= position).sum())


def _sines(row: int, column: int) -> torch.Tensor:
    quarter = SIZE // 4
    values = []
    for index in (column, row):
        for function in (math.sin, math.cos):
            values += [function(index / 10000 ** (i / quarter)) for i in range(quarter)]
    return torch.tensor(values)


class Processor:
    """Of the same."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def save_pretrained(self, folder: Path) -> None:
        """Write the tokenizer and preprocessor_config.json."""
        self.tokenizer.save_pretrained(folder)
        names = [f"{part}_{end}" for part in ("im", "slice", "im_id") for end in ("start", "end")]
        settings = dict(zip([*names, "unk"], TOKENS, strict=True)) | {
            "image_processor_type": "MiniCPMVImageProcessor",
            "processor_class": "MiniCPMVProcessor",
            "max_slice_nums": MAX_SLICES,
            "scale_resolution": RESOLUTION,
            "patch_size": PATCH,
            "use_image_id": True,
            "image_feature_size": QUERIES,
            "slice_mode": True,
            "norm_mean": [0.5, 0.4, 0.5],
            "norm_std": [0.5, 0.5, 0.3],
            "version": 2.6,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))

    def slices(self, image: Image.Image) -> tuple[list[torch.Tensor], int, int]:
        """The whole and its slices; columns and rows of slices, 0 where there are none."""
        area = RESOLUTION**2
        multiple = min(math.ceil(image.width * image.height / area), MAX_SLICES)
        columns = rows = 0
        if multiple > 1:
            best = math.inf
            for count in (multiple - 1, multiple, multiple + 1):
                for m in range(1, count + 1):
                    if count == 1 or count > MAX_SLICES or count % m:
                        continue
                    error = abs(math.log(image.width / image.height) - math.log(m / (count // m)))
                    if error < best:
                        best, columns, rows = error, m, count // m
        parts = [image.resize(_fit(image.width, image.height, columns == 0), 3)]
        if columns:
            width = max(round(image.width / columns) * columns, columns) / columns
            height = max(round(image.height / rows) * rows, rows) / rows
            width, height = _fit(width, height, True)
            refined = image.resize((width * columns, height * rows), 3)
            for row in range(rows):
                for column in range(columns):
                    x, y = column * width, row * height
                    parts.append(refined.crop((x, y, x + width, y + height)))
        mean, std = torch.tensor([0.5, 0.4, 0.5]), torch.tensor([0.5, 0.5, 0.3])
        pixels = [torch.tensor(np.asarray(part)).float() / 255 for part in parts]
        return [((x - mean) / std).permute(2, 0, 1) for x in pixels], columns, rows

    def __call__(self, images: list[Any] | None, text: str, return_tensors: str) -> Any:
        slices = []
        first, *rest = text.split("<image>")
        for number, (image, part) in enumerate(zip(images or (), rest, strict=True)):
            pixels, columns, rows = self.slices(image)
            slices += pixels
            unknown = "<unk>" * QUERIES
            first += f"<image_id>{number}</image_id><image>{unknown}</image>"
            line = f"<slice>{unknown}</slice>" * columns
            first += "\n".join([line] * rows) + part
        return {"input_ids": self.tokenizer(first, return_tensors="pt").input_ids, "slices": slices}


def _fit(width: float, height: float, grows: bool) -> tuple[int, int]:
    if grows or width * height > RESOLUTION**2:
        ratio = width / height
        height = int(RESOLUTION / math.sqrt(ratio))
        width = int(height * ratio)
    return max(round(width / PATCH), 1) * PATCH, max(round(height / PATCH), 1) * PATCH


def make(
    folder: Path, tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]
) -> tuple[MiniCPMV, Processor]:
    """Write a folder; `text` and `vision` are sizes."""
    torch.manual_seed(11)
    options = text | {"hidden_size": SIZE, "tie_word_embeddings": False}
    sizes = vision | {"image_size": TABLE_SIDE * PATCH, "patch_size": PATCH}
    model = MiniCPMV(
        tf.Qwen2ForCausalLM(tf.Qwen2Config(**options)).eval(),
        tf.SiglipVisionModel(tf.SiglipVisionConfig(**sizes, vision_use_head=False)).eval(),
        tokenizer.convert_tokens_to_ids("<unk>"),
    )
    for part in (model.text, model.tower, model.parts):
        for name, parameter in part.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape) * 0.2
                parameter.data = noise + (0.0 if "bias" in name else 1.0)
    folder.mkdir(exist_ok=True, parents=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config = options | {
        "architectures": ["MiniCPMV"],
        "model_type": "minicpmv",
        "version": 2.6,
        "dtype": "float32",
        "query_num": QUERIES,
        "drop_vision_last_layer": False,
        "vision_config": sizes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = Processor(tokenizer)
    processor.save_pretrained(folder)
    return model, processor
