"""Vision models of `transformers`: their own towers in front of a bridged text model.

A picture must affect a model only as vectors that replace its tokens' embeddings. Whether that is
so is tested when a model is loaded.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.contract.errors import InvalidRequest
from engine.kv_cache.kv_cache_config import single_group_config
from engine.models.forward_context import AttentionMetadata
from engine.multimodal.inputs import MediaTensors
from engine.multimodal.processor import MediaProcessor, PreparedMedia
from engine.transformers_backend.attention import PAGED, use_attention
from engine.transformers_backend.model import TransformersModel
from engine.transformers_backend.verify import UnsupportedAttention, is_close

#: Size of the test picture: large enough to be tiled, with different sides.
_TRIAL_SIZE = (90, 60)
#: Tokens before and after it.
_TRIAL_TOKENS = 5


class TransformersVisionModel(TransformersModel):
    """A `TransformersModel` whose prompts may contain pictures."""

    @property
    def image_features(self) -> Any:
        """Return the function of `transformers` from tensors to vectors; None if there is none."""
        owners = (self.model, getattr(self.model, "base_model", None))
        functions = (getattr(owner, "get_image_features", None) for owner in owners)
        return next(filter(None, functions), None)

    @torch.inference_mode()
    def encode(self, kind: str, tensors: MediaTensors) -> Tensor:
        """See `SupportsMultiModal`."""
        if kind != "image":
            raise InvalidRequest(f"{self.spec.architecture} takes no {kind}.", param="messages")
        features = self.image_features
        arguments = _supported_arguments(features, _as_tensors(tensors))
        use_attention(self.model, "eager")
        try:
            output = features(**arguments)
        finally:
            use_attention(self.model, PAGED)
        vectors = getattr(output, "pooler_output", output)
        if isinstance(vectors, list | tuple):
            vectors = torch.cat([part.flatten(0, -2) for part in vectors])
        flat: Tensor = vectors.flatten(0, -2).float()
        return flat


def _as_tensors(tensors: MediaTensors) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}


def _supported_arguments(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def verify_pictures(bridged: TransformersVisionModel, folder: Path) -> None:
    """Raise `UnsupportedAttention` unless a prompt with a picture has the logits of `transformers`,
    both whole and divided within the picture.
    """
    from PIL import Image

    if bridged.stateful:
        raise UnsupportedAttention("its text model carries a state, which pictures don't reach")
    if bridged.image_features is None:
        raise UnsupportedAttention("it has no get_image_features")
    image = Image.linear_gradient("L").resize(_TRIAL_SIZE).convert("RGB")
    prepared = MediaProcessor(folder).prepare(image)
    text = torch.arange(_TRIAL_TOKENS)
    ids = torch.cat((text, torch.full((prepared.num_vectors,), prepared.token_id), text + 1))
    theirs = _reference_logits(bridged, ids, prepared)
    vectors = bridged.encode("image", prepared.tensors)
    if len(vectors) != prepared.num_vectors:
        raise UnsupportedAttention(
            f"a picture of {prepared.num_vectors} tokens has {len(vectors)} vectors"
        )
    for size in (len(ids), len(ids) // 2 + 1):
        if not is_close([theirs], [_chunked_logits(bridged, ids, vectors, size)]):
            raise UnsupportedAttention(
                "it takes more of a picture than vectors in the place of its tokens' embeddings: "
                "positions, masks or layers of its own"
            )


def _reference_logits(
    bridged: TransformersVisionModel, ids: Tensor, prepared: PreparedMedia
) -> Tensor:
    """Return logits of the model's own forward pass, float32 [tokens, vocab]."""
    kinds = (ids == prepared.token_id).long()[None]
    arguments = {
        "input_ids": ids[None],
        "token_type_ids": kinds,
        "mm_token_type_ids": kinds,
        "use_cache": False,
        **_as_tensors(prepared.tensors),
    }
    use_attention(bridged.model, "eager")
    try:
        supported = _supported_arguments(bridged.model.forward, arguments)
        logits: Tensor = bridged.model(**supported).logits[0].float()
        return logits
    finally:
        use_attention(bridged.model, PAGED)


def _chunked_logits(
    bridged: TransformersVisionModel, ids: Tensor, vectors: Tensor, size: int
) -> Tensor:
    """Return logits of paged attention in steps of `size` tokens, float32 [tokens, vocab]."""
    bridged.allocate_kv(1, len(ids), torch.float32, single_group_config(len(bridged.layers)))
    try:
        parts = []
        for start in range(0, len(ids), size):
            positions = torch.arange(start, min(start + size, len(ids)))
            of_picture = positions - _TRIAL_TOKENS
            seen = (of_picture >= 0) & (of_picture < len(vectors))
            context = AttentionMetadata(
                positions=positions,
                slot_mapping=positions,
                block_tables=torch.zeros(1, 1, dtype=torch.int32),
                seq_lens=torch.tensor([int(positions[-1]) + 1], dtype=torch.int32),
                query_start_loc=torch.tensor([0, len(positions)], dtype=torch.int32),
                sequence_rows=torch.zeros(1, dtype=torch.int64),
                encoder_embeds=(seen.nonzero().flatten(), vectors[of_picture[seen]]),
            )
            parts.append(bridged.forward(ids[positions], context))
        return torch.cat(parts)
    finally:
        bridged.release_kv()
