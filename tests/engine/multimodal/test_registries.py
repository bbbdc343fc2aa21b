"""Model classes that prepare their pictures by vLLM's registries, as its manual's guide has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from engine import LLM, ModelRegistry, SamplingParams
from engine.contract.errors import InvalidRequest
from engine.inputs import INPUT_REGISTRY, InputContext, LLMInputs
from engine.inputs.registry import DummyDataFactory
from engine.model_executor.models.interfaces import SupportsVision
from engine.models.decoder import NativeDecoder
from engine.models.registry import decoder_spec
from engine.multimodal import MULTIMODAL_REGISTRY, MultiModalInputs
from engine.multimodal.image import ImagePlugin
from engine.sequence import SequenceData
from tests.engine.models import VOCAB, make_model, read_model
from tests.engine.multimodal.models import picture

#: Tokens of a picture, and the one that stands for each.
SQUARES, IMAGE_TOKEN_ID = 4, VOCAB - 1
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def map_squares(context: InputContext, image: Any) -> MultiModalInputs:
    """The mean colour of each quarter."""
    context.get_hf_config(LlamaConfig)
    pixels = torch.from_numpy(np.asarray(image.resize((2, 2)), dtype=np.float32) / 255)
    return MultiModalInputs(pixel_values=pixels.reshape(SQUARES, 3))


def insert_squares(context: InputContext, inputs: LLMInputs) -> LLMInputs:
    """Several tokens in the place of one."""
    token_ids: list[int] = []
    for token in inputs["prompt_token_ids"]:
        token_ids += [token] * (SQUARES if token == IMAGE_TOKEN_ID else 1)
    return {**inputs, "prompt_token_ids": token_ids}


def dummy_squares(context: InputContext, seq_len: int) -> tuple[SequenceData, dict[str, Any]]:
    """As many pictures as fit."""
    return SequenceData([IMAGE_TOKEN_ID] * seq_len), {"image": picture(1, 8, 8)}


FACTORY: DummyDataFactory = dummy_squares


@MULTIMODAL_REGISTRY.register_image_input_mapper(map_squares)
@MULTIMODAL_REGISTRY.register_max_image_tokens(SQUARES)
@INPUT_REGISTRY.register_dummy_data(FACTORY)
@INPUT_REGISTRY.register_input_processor(insert_squares)
class SquaresForImage2Seq(NativeDecoder, SupportsVision):
    """Llama that sees the colour of four squares."""

    @staticmethod
    def make_spec(config: dict[str, Any]) -> Any:
        return decoder_spec({**config, "architectures": ["LlamaForCausalLM"]})

    def encode(self, kind: str, tensors: Any) -> torch.Tensor:
        colours = torch.from_numpy(tensors["pixel_values"].copy())
        return colours.repeat(1, self.spec.hidden_size // 3 + 1)[:, : self.spec.hidden_size]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("squares")
    make_model("llama", folder, eos_token_id=None)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["SquaresForImage2Seq"], "image_token_index": IMAGE_TOKEN_ID}
    (folder / "config.json").write_text(json.dumps(config))
    ModelRegistry.register_model("SquaresForImage2Seq", SquaresForImage2Seq)
    yield folder
    ModelRegistry.unregister_model("SquaresForImage2Seq")


def model_config_of(llm: LLM) -> Any:
    return llm.llm_engine.vllm_config.model_config


def test_pictures_go_through_the_functions_of_their_model_class(folder: Path) -> None:
    llm = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=64, block_size=8,
        max_num_batched_tokens=8,
    )  # fmt: skip
    token_ids = [5, 6, IMAGE_TOKEN_ID, 7, IMAGE_TOKEN_ID, 8]
    images = [picture(1, 20, 20), picture(2, 30, 10)]
    prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}
    tokens = [list(llm.generate(prompt, PARAMS)[0].outputs[0].token_ids) for _ in range(2)]
    core: Any = llm.llm_engine.core
    model, context = core.executor.worker.loaded.model, InputContext(model_config_of(llm))
    oracle = read_model(folder)
    parts = [oracle.get_input_embeddings()(torch.tensor([token])) for token in token_ids]
    for position, image in zip((2, 4), images, strict=True):
        tensors = {name: value.numpy() for name, value in map_squares(context, image).items()}
        parts[position] = model.encode("image", tensors)
    expected = oracle.generate(
        inputs_embeds=torch.cat(parts)[None], max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert tokens == [expected[0].tolist()] * 2
    other = prompt | {"multi_modal_data": {"image": images[::-1]}}
    assert list(llm.generate(other, PARAMS)[0].outputs[0].token_ids) != tokens[0]


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    for token_ids, images in (
        ([5, 6], [picture(1, 8, 8)]),
        ([IMAGE_TOKEN_ID] * 2, [picture(1, 8, 8)]),
        ([IMAGE_TOKEN_ID], [picture(1, 8, 8)] * 3),
    ):
        with pytest.raises(InvalidRequest) as refused:
            llm.generate({"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}})
        assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="'image'"):
        llm.generate({"prompt_token_ids": [5], "multi_modal_data": {"video": [1]}})


def test_the_registries_answer_for_a_model(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    model_config = model_config_of(llm)
    assert MULTIMODAL_REGISTRY.get_max_multimodal_tokens(model_config) == SQUARES
    mapped = MULTIMODAL_REGISTRY.create_input_mapper(model_config)({"image": picture(1, 8, 8)})
    assert mapped["pixel_values"].shape == (SQUARES, 3)
    process = INPUT_REGISTRY.create_input_processor(model_config)
    processed = process(LLMInputs(prompt_token_ids=[1, IMAGE_TOKEN_ID]))
    assert processed["prompt_token_ids"] == [1, *[IMAGE_TOKEN_ID] * SQUARES]
    sequence, media = INPUT_REGISTRY.dummy_data_for_profiling(model_config, 12)
    assert len(sequence.prompt_token_ids) == 12
    assert media is not None
    context = InputContext(model_config)
    assert context.get_multimodal_config()["image"] > 0
    with pytest.raises(TypeError):
        context.get_hf_config(dict)
    with pytest.raises(NotImplementedError, match="'smell'"):
        MULTIMODAL_REGISTRY.register_input_mapper("smell")
    assert ImagePlugin().get_data_key() == "image"
