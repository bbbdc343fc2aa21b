"""The memory that a model's encoder needs on a GPU, as a run of it shows."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from engine.contract.errors import ModelLoadError
from engine.models.interface import EngineModel, SupportsMultiModal
from engine.multimodal.processor import MediaProcessor

#: Sides of square pictures in pixels; processors shrink what is too large for their model.
_SIDES = (4096, 2048, 1024, 512, 256)


def fill_encoder_cache(model: EngineModel, folder: Path, capacity: int) -> Tensor | None:
    """Encode the largest picture of at most `capacity` vectors, and allocate as many.

    Args:
        folder: that of the model's image processor.

    Returns:
        [capacity, n], uninitialized, in place of the outputs that the worker keeps; None for a
        model without an encoder, or whose checkpoint has no image processor.
    """
    from PIL import Image

    if not isinstance(model, SupportsMultiModal):
        return None
    try:
        processor = MediaProcessor(folder)
    except ModelLoadError:
        return None
    for side in _SIDES:
        picture = processor.prepare(Image.new("RGB", (side, side)))
        if picture.num_vectors <= capacity:
            break
    vectors = model.encode(picture.kind, picture.tensors)
    return vectors.new_empty((capacity, vectors.shape[1]))
