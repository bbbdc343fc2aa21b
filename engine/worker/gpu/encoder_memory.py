"""The memory that a model's encoder needs on a GPU, as a run of it shows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np
from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.interface import EngineModel, SupportsMultiModal
from engine.models.vision.family import VisionDecoder
from engine.multimodal.audio import HOP
from engine.multimodal.audio_prompts import AudioProcessor
from engine.multimodal.processor import MediaProcessor, PreparedMedia

#: Sides of square pictures in pixels; processors shrink what is too large for their model.
_SIDES = (4096, 2048, 1024, 512, 256)


def fill_encoder_cache(model: EngineModel, folder: Path, capacity: int) -> Tensor | None:
    """Encode the largest picture or audio of at most `capacity` vectors, and allocate as many.

    Args:
        folder: that of the model's processor.

    Returns:
        [capacity, n], uninitialized, in place of the outputs that the worker keeps; None for a
        model without an encoder, or whose checkpoint has no processor.
    """
    if not isinstance(model, SupportsMultiModal):
        return None
    hears = isinstance(model, VisionDecoder) and model.hears
    try:
        item = (_longest_audio if hears else _largest_picture)(folder, capacity)
    except ModelLoadError:
        return None
    vectors = model.encode(item.kind, item.tensors)
    return vectors.new_empty((capacity, vectors.shape[1]))


def _largest_picture(folder: Path, capacity: int) -> PreparedMedia:
    from PIL import Image

    processor = MediaProcessor(folder)
    for side in _SIDES:
        picture = processor.prepare(Image.new("RGB", (side, side)))
        if picture.num_vectors <= capacity:
            break
    return picture


def _longest_audio(folder: Path, capacity: int) -> PreparedMedia:
    processor = AudioProcessor.from_folder(folder)
    layout = processor.layout
    frames = range(1, layout.max_frames + 1)
    fitting = bisect_right(frames, capacity, key=layout.count_tokens)
    # A shorter one than the shortest doesn't exist.
    num_frames = max(fitting, bisect_left(frames, 1, key=layout.count_tokens) + 1)
    return processor.prepare(np.zeros(num_frames * HOP, dtype=np.float32))
