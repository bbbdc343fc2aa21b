"""Tiny random models that see, with processors, and `transformers` on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import AddedToken

from tests.engine.models import VOCAB, make_tokenizer

IMAGE_TOKEN = "<image>"
#: Content as a text or as parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
    "initializer_range": 0.3,
}


def tokenizer_with(*tokens: str) -> tf.PreTrainedTokenizerFast:
    """The tests' tokenizer with special tokens."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return tokenizer


def _sizes(tokenizer: tf.PreTrainedTokenizerFast) -> dict[str, Any]:
    return _TEXT | {
        "vocab_size": max(VOCAB, len(tokenizer)),
        "eos_token_id": None,
        "bos_token_id": None,
    }


def llava(folder: Path) -> Any:
    """LLaVA-1.5: CLIP, a class token, the last layer but one."""
    tokenizer = tokenizer_with(IMAGE_TOKEN)
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**_VISION),
        text_config=tf.LlamaConfig(**_sizes(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=-2,
    )
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _saved(folder, tf.LlavaForConditionalGeneration, config, processor)


def llava_next(folder: Path) -> Any:
    """LLaVA-NeXT: any size, tiles, rows that end with a vector of their own."""
    tokenizer = tokenizer_with(IMAGE_TOKEN)
    pinpoints = [[28, 56], [56, 28], [56, 56], [84, 28]]
    config = tf.LlavaNextConfig(
        vision_config=tf.CLIPVisionConfig(**_VISION),
        text_config=tf.MistralConfig(**_sizes(tokenizer), sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_grid_pinpoints=pinpoints,
    )
    processor = tf.LlavaNextProcessor(
        tf.LlavaNextImageProcessorPil(
            size={"shortest_edge": 28},
            crop_size={"height": 28, "width": 28},
            image_grid_pinpoints=pinpoints,
        ),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _saved(folder, tf.LlavaNextForConditionalGeneration, config, processor)


def idefics3(folder: Path) -> Any:
    """Idefics3: tiles between tokens that name their row and column, pixels joined."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = tokenizer_with(
        IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles
    )
    config = tf.Idefics3Config(
        vision_config=tf.Idefics3VisionConfig(**_VISION),
        text_config=tf.LlamaConfig(**_sizes(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=2,
    )
    processor = tf.Idefics3Processor(
        tf.Idefics3ImageProcessorPil(
            size={"longest_edge": 84}, max_image_size={"longest_edge": 28}
        ),
        tokenizer,
        image_seq_len=4,
    )
    return _saved(folder, tf.Idefics3ForConditionalGeneration, config, processor)


def qwen2_vl(folder: Path) -> Any:
    """Qwen2-VL: positions in time, height and width."""
    tokenizer, sizes = _qwen_tokenizer()
    config = tf.Qwen2VLConfig(
        vision_config={
            "depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2,
            "patch_size": 7, "spatial_merge_size": 2, "initializer_range": 0.3,
        },
        **_qwen(tokenizer, sizes),
    )  # fmt: skip
    return _saved(
        folder,
        tf.Qwen2VLForConditionalGeneration,
        config,
        QwenProcessor(tokenizer),
    )


def qwen25_vl(folder: Path) -> Any:
    """Qwen2.5-VL: windows in the tower."""
    tokenizer, sizes = _qwen_tokenizer()
    config = tf.Qwen2_5_VLConfig(
        vision_config={
            "depth": 4, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48,
            "num_heads": 4, "patch_size": 7, "spatial_merge_size": 2, "window_size": 28,
            "fullatt_block_indexes": [1, 3], "initializer_range": 0.3,
        },
        **_qwen(tokenizer, sizes),
    )  # fmt: skip
    return _saved(
        folder,
        tf.Qwen2_5_VLForConditionalGeneration,
        config,
        QwenProcessor(tokenizer),
    )


def _qwen_tokenizer() -> tuple[tf.PreTrainedTokenizerFast, dict[str, Any]]:
    tokenizer = tokenizer_with(IMAGE_TOKEN, "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    return tokenizer, _sizes(tokenizer)


def _qwen(tokenizer: tf.PreTrainedTokenizerFast, sizes: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    ids = tokenizer.convert_tokens_to_ids
    return {
        "text_config": sizes | {"rope_parameters": rope, "tie_word_embeddings": False},
        "tie_word_embeddings": False,
        "image_token_id": ids(IMAGE_TOKEN),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }


class QwenProcessor:
    """`transformers`' own needs torchvision, for videos."""

    def __init__(self, tokenizer: tf.PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        pixels = {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 40}
        self.images = tf.Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, size=pixels)

    def save_pretrained(self, folder: Path) -> None:
        """Write both."""
        self.tokenizer.save_pretrained(folder)
        self.images.save_pretrained(folder)

    def __call__(self, images: list[Any] | None, text: str, return_tensors: str) -> Any:
        if images is None:
            return self.tokenizer(text, return_tensors="pt")
        outputs = self.images(images, return_tensors="pt")
        first, *rest = text.split(IMAGE_TOKEN)
        for grid, part in zip(outputs["image_grid_thw"], rest, strict=True):
            first += IMAGE_TOKEN * (int(grid.prod()) // 4) + part
        inputs = self.tokenizer(first, return_tensors="pt")
        token = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        kinds = (inputs["input_ids"] == token).int()
        return {**inputs, **outputs, "mm_token_type_ids": kinds}


def _saved(folder: Path, kind: type, config: Any, processor: Any) -> Any:
    torch.manual_seed(11)
    model = kind(config).eval().float()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


FAMILIES = {
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics3,
    "qwen2_vl": qwen2_vl,
    "qwen25_vl": qwen25_vl,
}


def picture(seed: int, width: int, height: int) -> Image.Image:
    """A picture with some structure."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@torch.inference_mode()
def expected(model: Any, processor: Any, prompt: str, images: list[Any], count: int) -> list[int]:
    """What `transformers` generates, greedily."""
    inputs = processor(images=images or None, text=prompt, return_tensors="pt")
    inputs.pop("rows", None), inputs.pop("cols", None), inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()
