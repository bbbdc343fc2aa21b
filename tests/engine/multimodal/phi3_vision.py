"""A tiny Phi-3-vision: `transformers`' CLIP and Phi-3, and what lies between them by its public
description, tile by tile and row by row.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional

NUM_CROPS = 4
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
TOKEN = "<|image|>"
#: As published: content is a string.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + "
    "'<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


class Phi3Vision:
    """Generates as `transformers`' models do. Attributes: see `make`."""

    config = SimpleNamespace(model_type="phi3_v")

    def __init__(self, text: Any, tower: Any, side: int) -> None:
        self.text, self.tower, self.side = text, tower, side
        size, hidden = 4 * tower.config.hidden_size, text.config.hidden_size
        self.row_end, self.between = torch.randn(size), torch.randn(size)
        self.projection = torch.nn.Sequential(
            torch.nn.Linear(size, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """By the names of a checkpoint."""
        prefix = "model.vision_embed_tokens."
        tower = {
            f"{prefix}img_processor.vision_model.{name.removeprefix('vision_model.')}": tensor
            for name, tensor in self.tower.state_dict().items()
        }
        projection = {
            f"{prefix}img_projection.{name}": tensor
            for name, tensor in self.projection.state_dict().items()
        }
        separators = {
            f"{prefix}sub_GN": self.row_end[None, None, None],
            f"{prefix}glb_GN": self.between[None, None],
        }
        state = {**self.text.state_dict(), **tower, **projection, **separators}
        return {name: tensor.detach().contiguous() for name, tensor in state.items()}

    def vectors(self, tiles: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[n, hidden] of a picture: float32 [1 + rows * columns, 3, side, side]."""
        states = self.tower(tiles, output_hidden_states=True).hidden_states[-2][:, 1:]
        patches = math.isqrt(states.shape[1])

        def block(tile: int, row: int, column: int) -> torch.Tensor:
            """Four patches of a tile, side by side."""
            corners = [(2 * row + i) * patches + 2 * column + j for i in (0, 1) for j in (0, 1)]
            return torch.cat([states[tile, corner] for corner in corners])

        sequence = []
        half = patches // 2
        for row in range(rows * half):
            for column in range(columns * half):
                tile = 1 + (row // half) * columns + column // half
                sequence.append(block(tile, row % half, column % half))
            sequence.append(self.row_end)
        sequence.append(self.between)
        for row in range(half):
            sequence += [block(0, row, column) for column in range(half)] + [self.row_end]
        return self.projection(torch.stack(sequence))

    def generate(
        self,
        input_ids: torch.Tensor,
        pictures: Any = (),
        attention_mask: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        """int64 [1, tokens]: the prompt and what follows."""
        embeds = self.text.get_input_embeddings()(input_ids).clone()
        if pictures:
            vectors = [self.vectors(*picture) for picture in pictures]
            embeds[input_ids == self.text.config.pad_token_id] = torch.cat(vectors)
        new = self.text.generate(
            inputs_embeds=embeds, attention_mask=torch.ones_like(input_ids), **options
        )
        return torch.cat((input_ids, new), dim=1)


class Processor:
    """Of the same: `side` pixels a tile, `tokens` of its side."""

    def __init__(self, tokenizer: Any, side: int, tokens: int) -> None:
        self.tokenizer, self.side, self.tokens = tokenizer, side, tokens

    def save_pretrained(self, folder: Path) -> None:
        """Write the tokenizer and preprocessor_config.json."""
        self.tokenizer.save_pretrained(folder)
        settings = {
            "image_processor_type": "Phi3VImageProcessor",
            "processor_class": "Phi3VProcessor",
            "auto_map": {"AutoImageProcessor": "image_processing_phi3_v.Phi3VImageProcessor"},
            "num_crops": NUM_CROPS,
            "num_img_tokens": 144,
            "image_mean": MEAN,
            "image_std": STD,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))

    def prepare(
        self, image: Image.Image, num_crops: int = NUM_CROPS
    ) -> tuple[torch.Tensor, int, int]:
        """Tiles, and how many of them in a column and in a row."""
        tall = image.height > image.width
        image = image.transpose(Image.Transpose.TRANSPOSE) if tall else image
        ratio = image.width / image.height
        fitting = [n for n in range(1, num_crops + 1) if n * math.ceil(n / ratio) <= num_crops]
        width = max(fitting) * self.side
        height = int(width / ratio)
        pixels = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        x = torch.tensor(pixels).permute(2, 0, 1).float()
        missing = math.ceil(height / self.side) * self.side - height
        x = functional.pad(x, (0, 0, missing // 2, missing - missing // 2), value=255.0)
        x = x.transpose(1, 2) if tall else x
        x = (x / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        overview = functional.interpolate(x[None], (self.side, self.side), mode="bicubic")
        rows, columns = x.shape[1] // self.side, x.shape[2] // self.side
        tiles = [part for strip in x.chunk(rows, 1) for part in strip.chunk(columns, 2)]
        return torch.cat((overview, torch.stack(tiles))), rows, columns

    def num_tokens(self, rows: int, columns: int) -> int:
        """As `calc_num_image_tokens` has it."""
        tiles = (rows * columns + 1) * self.tokens**2
        return tiles + 1 + (rows + 1) * self.tokens

    def __call__(self, images: list[Any] | None, text: str, return_tensors: str) -> Any:
        pictures = [self.prepare(image) for image in images or ()]
        counts = iter([self.num_tokens(rows, columns) for _, rows, columns in pictures])
        expanded = re.sub(r"<\|image(_\d+)?\|>", lambda _: TOKEN * next(counts), text)
        inputs = self.tokenizer(expanded, return_tensors="pt")
        return {"input_ids": inputs["input_ids"], "pictures": pictures}


def make(
    folder: Path, tokenizer: Any, text: dict[str, Any], vision: dict[str, Any]
) -> tuple[Phi3Vision, Processor]:
    """Write a folder; `text` and `vision` are sizes."""
    torch.manual_seed(11)
    tokenizer.chat_template = CHAT_TEMPLATE
    token = tokenizer.convert_tokens_to_ids(TOKEN)
    options = text | {"pad_token_id": token, "tie_word_embeddings": False}
    side, patch = vision["image_size"], vision["patch_size"]
    model = Phi3Vision(
        tf.Phi3ForCausalLM(tf.Phi3Config(**options)).eval(),
        tf.CLIPVisionModel(tf.CLIPVisionConfig(**vision, hidden_act="quick_gelu")).eval(),
        side,
    )
    for part in (model.text, model.tower, model.projection):
        for name, parameter in part.named_parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape) * 0.2
                parameter.data = noise + (0.0 if "bias" in name else 1.0)
    folder.mkdir(exist_ok=True, parents=True)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    config = options | {
        "architectures": ["Phi3VForCausalLM"],
        "model_type": "phi3_v",
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3_v.Phi3VForCausalLM"},
        "dtype": "float32",
        "img_processor": {"name": "clip_vision_model", "num_img_tokens": 144, **vision},
        "embd_layer": {
            "embedding_cls": "image",
            "projection_cls": "mlp",
            "hd_transform_order": "sub_glb",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    processor = Processor(tokenizer, side, side // patch // 2)
    processor.save_pretrained(folder)
    return model, processor
