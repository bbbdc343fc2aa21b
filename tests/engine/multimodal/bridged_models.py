"""Tiny random models that see through the Transformers bridge alone, with processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers as tf

from tests.engine.multimodal.models import IMAGE_TOKEN, TEXT, VISION, save_model, tokenizer_with


def _sizes(tokenizer: tf.PreTrainedTokenizerFast) -> dict[str, Any]:
    return TEXT | {"vocab_size": len(tokenizer), "eos_token_id": None, "bos_token_id": None}


def vip_llava(folder: Path) -> Any:
    """VipLLaVA: states of several layers side by side."""
    tokenizer = tokenizer_with(IMAGE_TOKEN)
    config = tf.VipLlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION),
        text_config=tf.LlamaConfig(**_sizes(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layers=(-1, -2, 1),
    )
    config.vision_feature_layer = (-1, -2, 1)
    size = {"height": 28, "width": 28}
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return save_model(folder, tf.VipLlavaForConditionalGeneration, config, processor)


def deepseek_vl(folder: Path) -> Any:
    """DeepSeek-VL: SigLIP's last states."""
    tokenizer = tokenizer_with(IMAGE_TOKEN)
    tokenizer._set_model_specific_special_tokens({"image_token": IMAGE_TOKEN})
    config = tf.DeepseekVLConfig(
        vision_config=tf.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=tf.LlamaConfig(**_sizes(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        tie_word_embeddings=False,
    )
    images = tf.DeepseekVLImageProcessorPil(size={"height": 28, "width": 28}, min_size=7)
    processor = tf.DeepseekVLProcessor(images, tokenizer, num_image_tokens=16)
    return save_model(folder, tf.DeepseekVLForConditionalGeneration, config, processor)


def idefics2(folder: Path) -> Any:
    """Idefics2: any picture is as many vectors, which a resampler learned."""
    tokenizer = tokenizer_with(IMAGE_TOKEN, "<fake_token_around_image>", "<end_of_utterance>")
    config = tf.Idefics2Config(
        vision_config=tf.Idefics2VisionConfig(**VISION),
        perceiver_config={
            "hidden_size": 64, "resampler_n_latents": 5, "resampler_depth": 2,
            "resampler_n_heads": 4, "resampler_head_dim": 16, "num_key_value_heads": 2,
        },
        text_config=tf.MistralConfig(**_sizes(tokenizer), sliding_window=None),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
    )  # fmt: skip
    images = tf.Idefics2ImageProcessorPil(
        size={"longest_edge": 28, "shortest_edge": 14}, do_image_splitting=False
    )
    processor = tf.Idefics2Processor(images, tokenizer, image_seq_len=5)
    return save_model(folder, tf.Idefics2ForConditionalGeneration, config, processor)


def paligemma(folder: Path) -> Any:
    """PaliGemma, whose prompt sees all of itself."""
    tokenizer = tokenizer_with(IMAGE_TOKEN)
    tokenizer._set_model_specific_special_tokens({"image_token": IMAGE_TOKEN})
    tokenizer.bos_token = "<|im_start|>"
    config = tf.PaliGemmaConfig(
        vision_config=tf.SiglipVisionConfig(**VISION, vision_use_head=False, projection_dim=64),
        text_config=tf.GemmaConfig(**_sizes(tokenizer), head_dim=16),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        projection_dim=64,
    )
    images = tf.SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 16
    processor = tf.PaliGemmaProcessor(images, tokenizer)
    return save_model(folder, tf.PaliGemmaForConditionalGeneration, config, processor)
