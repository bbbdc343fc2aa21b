"""A tiny ColQwen2, its processor, and `transformers`' vectors on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf

from tests.engine.multimodal.models import TEXT, save_model, tokenizer_with

IMAGE_TOKEN = "<|image_pad|>"


def make_colqwen2(folder: Path) -> tuple[Any, Any]:
    """Write a folder; returns model and processor."""
    tokenizer = tokenizer_with(IMAGE_TOKEN, "<|vision_start|>", "<|vision_end|>", "<|endoftext|>")
    tokenizer.pad_token = "<|endoftext|>"
    ids = tokenizer.convert_tokens_to_ids
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vlm = tf.Qwen2VLConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2,
            "patch_size": 7, "spatial_merge_size": 2, "initializer_range": 0.3,
        },
        image_token_id=ids(IMAGE_TOKEN),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )  # fmt: skip
    pixels = {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 40}
    images = tf.Qwen2VLImageProcessorPil(patch_size=7, merge_size=2, size=pixels)
    config = tf.ColQwen2Config(vlm_config=vlm.to_dict(), embedding_dim=24)
    processor = tf.ColQwen2Processor(images, tokenizer)
    return save_model(folder, tf.ColQwen2ForRetrieval, config, processor)


@torch.inference_mode()
def expected_vectors(model: Any, processor: Any, **inputs: Any) -> torch.Tensor:
    """float32 [tokens, size] of one text or picture.

    The positions are those that the published weights were trained with: `transformers`' model
    takes them, and counts tokens one by one without.
    """
    batch = processor(**inputs, return_tensors="pt")
    ids = batch["input_ids"]
    grid = batch.get("image_grid_thw")
    kinds = (ids == processor.image_token_id).int()
    positions, _ = model.vlm.get_rope_index(ids, image_grid_thw=grid, mm_token_type_ids=kinds)
    arguments = (
        {"pixel_values": batch["pixel_values"], "image_grid_thw": grid} if grid is not None else {}
    )
    return model(input_ids=ids, position_ids=positions, **arguments).embeddings[0]
