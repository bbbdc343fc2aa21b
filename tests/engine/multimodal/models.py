"""Tiny random models that see, with processors, and `transformers` on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import AddedToken

from tests.engine.models import VOCAB, make_tokenizer
from tests.engine.multimodal import minicpmv as mini
from tests.engine.multimodal import phi3_vision as phi3

IMAGE_TOKEN = "<image>"
#: Content as a text or as parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}
VISION = {
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
    return TEXT | {
        "vocab_size": max(VOCAB, len(tokenizer)),
        "eos_token_id": None,
        "bos_token_id": None,
    }


def llava(folder: Path) -> Any:
    """LLaVA-1.5: CLIP, a class token, the last layer but one."""
    tokenizer = tokenizer_with(IMAGE_TOKEN)
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION),
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
    return save_model(folder, tf.LlavaForConditionalGeneration, config, processor)


def llava_next(folder: Path) -> Any:
    """LLaVA-NeXT: any size, tiles, rows that end with a vector of their own."""
    tokenizer = tokenizer_with(IMAGE_TOKEN)
    pinpoints = [[28, 56], [56, 28], [56, 56], [84, 28]]
    config = tf.LlavaNextConfig(
        vision_config=tf.CLIPVisionConfig(**VISION),
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
    return save_model(folder, tf.LlavaNextForConditionalGeneration, config, processor)


def idefics3(folder: Path) -> Any:
    """Idefics3: tiles between tokens that name their row and column, pixels joined."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = tokenizer_with(
        IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles
    )
    config = tf.Idefics3Config(
        vision_config=tf.Idefics3VisionConfig(**VISION),
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
    return save_model(folder, tf.Idefics3ForConditionalGeneration, config, processor)


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
    return save_model(
        folder, tf.Qwen2VLForConditionalGeneration, config, _qwen_processor(tokenizer)
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
    return save_model(
        folder, tf.Qwen2_5_VLForConditionalGeneration, config, _qwen_processor(tokenizer)
    )


def qwen3_vl(folder: Path) -> Any:
    """Qwen3-VL: what the tower's layers return is added within the decoder."""
    return _qwen3_vl(folder, tf.Qwen3VLForConditionalGeneration)


def qwen3_vl_moe(folder: Path) -> Any:
    """Qwen3-VL with experts in most layers."""
    return _qwen3_vl(
        folder,
        tf.Qwen3VLMoeForConditionalGeneration,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        mlp_only_layers=[1],
    )


def _qwen3_vl(folder: Path, kind: type, **text: Any) -> Any:
    tokenizer, sizes = _qwen_tokenizer()
    options = _qwen(tokenizer, sizes | {"head_dim": 16} | text)
    rope = {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
    options["text_config"]["rope_parameters"] = {"rope_type": "default", **rope}
    config = kind.config_class(
        vision_config={
            "depth": 4, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48,
            "num_heads": 4, "patch_size": 7, "spatial_merge_size": 2, "initializer_range": 0.3,
            "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2],
        },
        **options,
    )  # fmt: skip
    return save_model(folder, kind, config, _qwen_processor(tokenizer))


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


class ImagesProcessor:
    """A tokenizer and an image processor: `transformers`' own also wants one of videos, which needs
    torchvision.

    `replace`: of a class of `transformers`, whose other attributes are `facts`.
    """

    def __init__(
        self,
        tokenizer: tf.PreTrainedTokenizerFast,
        images: Any,
        replace: Callable[..., str] | None = None,
        image_token: str = IMAGE_TOKEN,
        options: dict[str, Any] | None = None,
        **facts: Any,
    ) -> None:
        self.tokenizer, self.images, self.replace = tokenizer, images, replace
        self.image_token, self.options = image_token, options or {}
        self.facts = SimpleNamespace(image_token=image_token, **facts)

    def save_pretrained(self, folder: Path) -> None:
        """Write both."""
        self.tokenizer.save_pretrained(folder)
        self.images.save_pretrained(folder)

    def _replacement(self, outputs: Any, index: int) -> str:
        if self.replace is not None:
            return self.replace(self.facts, outputs, index)
        return self.image_token * (int(outputs["image_grid_thw"][index].prod()) // 4)

    def __call__(self, images: list[Any] | None, text: str, return_tensors: str) -> Any:
        if images is None:
            return self.tokenizer(text, return_tensors="pt")
        nested = [images] if "rows" in self.images(images[0], **self.options) else images
        outputs = self.images(nested, return_tensors="pt", **self.options)
        first, *rest = text.split(self.image_token)
        for index, part in enumerate(rest):
            first += self._replacement(outputs, index) + part
        inputs = self.tokenizer(first, return_tensors="pt")
        for name in ("rows", "cols", "num_patches"):
            outputs.pop(name, None)
        tensors = {**inputs, **outputs}
        if "image_grid_thw" in outputs:
            token = self.tokenizer.convert_tokens_to_ids(self.image_token)
            tensors["mm_token_type_ids"] = (inputs["input_ids"] == token).int()
        return tensors


def _qwen_processor(tokenizer: tf.PreTrainedTokenizerFast) -> ImagesProcessor:
    pixels = {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 40}
    images = tf.Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, size=pixels)
    return ImagesProcessor(tokenizer, images)


def smolvlm(folder: Path) -> Any:
    """SmolVLM: Idefics3 with another processor."""
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    tokenizer = tokenizer_with(
        IMAGE_TOKEN, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *tiles
    )
    config = tf.SmolVLMConfig(
        vision_config=tf.SmolVLMVisionConfig(**VISION),
        text_config=tf.LlamaConfig(**_sizes(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        scale_factor=2,
    )
    images = tf.SmolVLMImageProcessorPil(
        size={"longest_edge": 84}, max_image_size={"longest_edge": 28}
    )
    processor = ImagesProcessor(
        tokenizer,
        images,
        tf.SmolVLMProcessor.replace_image_token,
        options={"return_row_col_info": True},
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    return save_model(folder, tf.SmolVLMForConditionalGeneration, config, processor)


def gemma3(folder: Path) -> Any:
    """Gemma 3: pooled patches whose tokens see each other; every other layer has a window."""
    tokenizer = tokenizer_with("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    tokenizer._set_model_specific_special_tokens(names)
    ids = tokenizer.convert_tokens_to_ids
    sizes = _sizes(tokenizer) | {"num_hidden_layers": 4, "head_dim": 16}
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**VISION | {"image_size": 56}),
        text_config=tf.Gemma3TextConfig(
            **sizes,
            query_pre_attn_scalar=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        tie_word_embeddings=False,  # else the last token is said again
        mm_tokens_per_image=16,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
    )
    images = tf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    processor = tf.Gemma3Processor(images, tokenizer, image_seq_length=16)
    return save_model(folder, tf.Gemma3ForConditionalGeneration, config, processor)


def internvl(folder: Path) -> Any:
    """InternVL: tiles, factors of what layers add."""
    return _internvl(folder)


def internvl_rms(folder: Path) -> Any:
    """InternVL's large tower: RMS norms, normed queries and keys; a last norm, another layer."""
    return _internvl(
        folder, norm_type="rms_norm", use_qk_norm=True, attention_bias=True, use_mean_pooling=False
    )


def _internvl(folder: Path, **vision: Any) -> Any:
    tokenizer = tokenizer_with(IMAGE_TOKEN, "<img>", "</img>", "<video>")
    names = {"start_image_token": "<img>", "end_image_token": "</img>"}
    tokenizer._set_model_specific_special_tokens(names)
    config = tf.InternVLConfig(
        vision_config=tf.InternVLVisionConfig(**VISION, layer_scale_init_value=0.7, **vision),
        text_config=tf.Qwen2Config(**_sizes(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=4,
    )
    images = tf.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=4)
    processor = ImagesProcessor(
        tokenizer,
        images,
        tf.InternVLProcessor.replace_image_token,
        options={"crop_to_patches": True},
        image_seq_length=4,
        start_image_token="<img>",
        end_image_token="</img>",
    )
    return save_model(folder, tf.InternVLForConditionalGeneration, config, processor)


def pixtral(folder: Path) -> Any:
    """Pixtral: LLaVA's connector behind a tower of any size."""
    tokenizer = tokenizer_with(IMAGE_TOKEN, "[IMG_BREAK]", "[IMG_END]")
    config = tf.LlavaConfig(
        vision_config=tf.PixtralVisionConfig(**VISION),
        text_config=tf.MistralConfig(**_sizes(tokenizer), sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    return save_model(
        folder, tf.LlavaForConditionalGeneration, config, _pixtral_processor(tokenizer, 1)
    )


def mistral3(folder: Path) -> Any:
    """Mistral 3: Pixtral's tower, four patches joined to one token."""
    tokenizer = tokenizer_with(IMAGE_TOKEN, "[IMG_BREAK]", "[IMG_END]")
    config = tf.Mistral3Config(
        vision_config=tf.PixtralVisionConfig(**VISION),
        text_config=tf.MistralConfig(**_sizes(tokenizer), sliding_window=None),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    return save_model(
        folder, tf.Mistral3ForConditionalGeneration, config, _pixtral_processor(tokenizer, 2)
    )


def minicpmv(folder: Path) -> Any:
    """MiniCPM-V: slices, a few vectors of each, numbered pictures."""
    tokenizer = tokenizer_with(*mini.TOKENS)
    return mini.make(folder, tokenizer, _sizes(tokenizer), VISION)


def phi3_vision(folder: Path, **text: Any) -> Any:
    """Phi-3-vision: tiles and the whole picture, rows that end with a vector of their own."""
    tokenizer = tokenizer_with(phi3.TOKEN)
    return phi3.make(folder, tokenizer, _sizes(tokenizer) | text, VISION)


def _pixtral_processor(tokenizer: tf.PreTrainedTokenizerFast, merge: int) -> ImagesProcessor:
    side = {"height": 7 * merge, "width": 7 * merge}
    return ImagesProcessor(
        tokenizer,
        tf.PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=side),
        _pixtral_tokens,
        side=7 * merge,
    )


def _pixtral_tokens(facts: Any, outputs: Any, index: int) -> str:
    """As `transformers`' PixtralProcessor, whose module needs torchvision."""
    height, width = outputs["image_sizes"][index].tolist()
    row = [facts.image_token] * (width // facts.side) + ["[IMG_BREAK]"]
    tokens = row * (height // facts.side)
    return "".join([*tokens[:-1], "[IMG_END]"])


def save_model(folder: Path, kind: type, config: Any, processor: Any) -> Any:
    torch.manual_seed(11)
    model = kind(config).eval().float()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or not parameter.any():
            # Biases, norms and some embeddings are all 0 or 1 at first: a forgotten one would go
            # unnoticed.
            noise = torch.randn(parameter.shape) * 0.2
            parameter.data = noise + (0.0 if "bias" in name or not parameter.any() else 1.0)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


FAMILIES = {
    "gemma3": gemma3,
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics3,
    "qwen2_vl": qwen2_vl,
    "qwen25_vl": qwen25_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "smolvlm": smolvlm,
    "internvl": internvl,
    "internvl_rms": internvl_rms,
    "minicpmv": minicpmv,
    "phi3_vision": phi3_vision,
    "pixtral": pixtral,
    "mistral3": mistral3,
}


#: What stands for a picture in a prompt, where it isn't `IMAGE_TOKEN`.
PLACEHOLDERS = {
    **dict.fromkeys(
        ("qwen2_vl", "qwen25_vl", "qwen3_vl", "qwen3_vl_moe"),
        f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>",
    ),
    "gemma3": "<start_of_image>",
    "phi3_vision": phi3.TOKEN,
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
    inputs.pop("rows", None), inputs.pop("cols", None)
    if model.config.model_type != "gemma3":
        inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()
