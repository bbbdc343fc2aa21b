"""Models that see give `transformers`' tokens, however their prompts are cut, cached or batched."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, InvalidRequest, ModelLoadError
from engine.multimodal.inputs import ANSWERS, PreparedPicture, PrepareRequest
from engine.multimodal.placeholders import expand_placeholders
from engine.multimodal.processor import MediaProcessor
from engine.offline.inputs import _check_uuids
from engine.system.worker_process import WorkerProcess
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, PLACEHOLDERS, expected, picture

NUM_TOKENS = 12


def picture_prompts(family: str) -> list[dict[str, Any]]:
    """Prompts with none, one and several pictures of many shapes."""
    image = PLACEHOLDERS.get(family, IMAGE_TOKEN)
    one, wide, tall = picture(1, 60, 40), picture(2, 100, 30), picture(3, 30, 90)
    return [
        {"prompt": "No picture at all", "multi_modal_data": {"image": []}},
        {"prompt": f"See {image} here.", "multi_modal_data": {"image": one}},
        {
            "prompt": f"{image} and {image}{image}",
            "multi_modal_data": {"image": [wide, tall, one]},
        },
        {"prompt": f"Twice {image} {image}", "multi_modal_data": {"image": [one, one]}},
    ]


def generate_tokens(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy tokens of all prompts together."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_tokens_equal_those_of_transformers(
    family: Callable[[str], tuple[Path, Any, Any]], name: str
) -> None:
    folder, model, processor = family(name)
    prompts = picture_prompts(name)
    expected_tokens = [
        expected(
            model,
            processor,
            prompt["prompt"],
            images if isinstance(images := prompt["multi_modal_data"]["image"], list) else [images],
            NUM_TOKENS,
        )
        for prompt in prompts
    ]
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256, max_num_batched_tokens=512)
    assert generate_tokens(llm, prompts) == expected_tokens  # together
    assert generate_tokens(llm, prompts) == expected_tokens  # from the cache
    assert llm.llm_engine.core.scheduler.kv.num_hit_tokens
    for prompt, tokens in zip(prompts, expected_tokens, strict=True):
        llm.reset_prefix_cache()
        assert generate_tokens(llm, [prompt]) == [tokens]  # alone


def test_experts_are_read_in_both_ways_that_files_of_qwen3_vl_have_them(
    family: Callable[[str], tuple[Path, Any, Any]], tmp_path: Path
) -> None:
    folder, _, _ = family("qwen3_vl_moe")
    shutil.copytree(folder, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    prompts = picture_prompts("qwen3_vl_moe")[1:2]
    options: Any = {"dtype": "float32", "num_gpu_blocks_override": 256}
    tokens = [
        generate_tokens(LLM(str(path), **options), prompts) for path in (folder, tmp_path / "model")
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_cut_prompts_and_preempted_sequences_give_the_same_tokens(
    family: Callable[[str], tuple[Path, Any, Any]], name: str
) -> None:
    folder, _, _ = family(name)
    prompts = picture_prompts(name)[1:]
    expected_token_ids = generate_tokens(
        LLM(str(folder), dtype="float32", num_gpu_blocks_override=256), prompts
    )
    cut = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256, max_num_batched_tokens=16)
    assert generate_tokens(cut, prompts) == expected_token_ids
    cut.reset_prefix_cache()
    core = cut.llm_engine.core
    step, calls = core.step, 0

    def step_with_preemptions() -> Any:
        nonlocal calls
        calls += 1
        return core.preempt_all() if calls % 4 == 0 else step()

    core.step = step_with_preemptions  # type: ignore[method-assign]
    assert generate_tokens(cut, prompts) == expected_token_ids
    assert core.scheduler.num_preemptions
    core.check_integrity()


@pytest.fixture(scope="module")
def media_worker() -> Iterator[WorkerProcess]:
    """As a gateway's, which prepares pictures for all models."""
    worker = WorkerProcess("engine.multimodal.worker", "media worker")
    yield worker
    worker.close()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_media_workers_prepare_pictures_as_the_engine_does(
    family: Callable[[str], tuple[Path, Any, Any]], media_worker: WorkerProcess, name: str
) -> None:
    folder, _, _ = family(name)
    file = io.BytesIO()
    picture(2, 100, 30).save(file, "PNG")
    request = msgspec.msgpack.encode(PrepareRequest(str(folder), file.getvalue()))
    answer = ANSWERS.decode(media_worker.request(request, 60) or b"")
    assert isinstance(answer, PreparedPicture), answer
    prepared = MediaProcessor(folder).prepare(picture(2, 100, 30))
    assert (answer.digest, answer.replacement, answer.grid, answer.num_vectors) == (
        prepared.digest, prepared.replacement, prepared.grid, prepared.num_vectors
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llava", {"crop_size": {"height": 14, "width": 14}}),
        ("llava_next", {"image_grid_pinpoints": [[14, 14]]}),
        ("idefics3", {"max_image_size": {"longest_edge": 14}}),
        ("internvl", {"size": {"height": 14, "width": 14}}),
        ("internvl", {"do_resize": False}),
        ("qwen2_vl", {"patch_size": 14}),
        ("qwen2_vl", {"patch_size": "14"}),
        ("qwen2_vl", {"merge_size": 1}),
        ("qwen2_vl", {"temporal_patch_size": 4}),
    ],
)
def test_options_for_another_encoder_are_refused_before_any_step(
    family: Callable[[str], tuple[Path, Any, Any]], name: str, options: dict[str, Any]
) -> None:
    processor = MediaProcessor(family(name)[0])
    with pytest.raises(InvalidRequest, match=f"{next(iter(options))} must be") as refused:
        processor.prepare(picture(1, 42, 35), options)
    assert refused.value.param == "mm_processor_kwargs"


def test_options_that_repeat_the_models_and_pixels_in_bytes_are_taken(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    folder = family("internvl")[0]
    options = {"size": {"height": 28, "width": 28}, "do_resize": True}
    image = picture(1, 42, 35)
    processor = MediaProcessor(folder)
    assert processor.prepare(image, options).digest == processor.prepare(image).digest
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=64)
    unscaled = {"do_rescale": False, "do_normalize": False}
    prompt = {"prompt": IMAGE_TOKEN, "multi_modal_data": {"image": image}}
    assert len(generate_tokens(llm, [prompt | {"mm_processor_kwargs": unscaled}])[0]) == NUM_TOKENS


def test_a_picture_of_which_nothing_is_left_is_refused(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    processor = MediaProcessor(family("pixtral")[0])
    with pytest.raises(InvalidRequest, match="too small"):
        processor.prepare(picture(1, 1, 1), {"do_resize": False})


def test_a_picture_is_encoded_once_for_a_tenant_and_never_shared_with_another(
    family: Callable[[str], tuple[Path, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = family("llava")
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    encoded = _count_encodings(llm, monkeypatch)
    picture_of = {"image": picture(5, 64, 64)}
    first = {"prompt": f"{IMAGE_TOKEN} What?", "multi_modal_data": picture_of, "cache_salt": "a"}
    other_question = first | {"prompt": f"So {IMAGE_TOKEN} why?"}
    answer = generate_tokens(llm, [first])
    assert generate_tokens(llm, [first]) == answer
    generate_tokens(llm, [other_question, other_question])
    assert len(encoded) == 1
    hits = llm.llm_engine.core.scheduler.kv.num_hit_tokens
    assert generate_tokens(llm, [first | {"cache_salt": "b"}]) == answer
    assert len(encoded) == 2
    assert llm.llm_engine.core.scheduler.kv.num_hit_tokens == hits
    llm.reset_mm_cache()
    generate_tokens(llm, [first | {"prompt": f"Then {IMAGE_TOKEN} who?"}])
    assert len(encoded) == 3
    llm.llm_engine.core.check_integrity()


def test_same_prompt_with_another_picture_is_another_prompt(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    folder, model, processor = family("llava")
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    prompt = f"A long question about what is in {IMAGE_TOKEN} please."
    for seed in (7, 8, 7):
        image = picture(seed, 50, 50)
        tokens = generate_tokens(llm, [{"prompt": prompt, "multi_modal_data": {"image": image}}])
        assert tokens == [expected(model, processor, prompt, [image], NUM_TOKENS)]


def test_a_step_that_fails_in_the_encoder_fails_its_request_alone(
    family: Callable[[str], tuple[Path, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = family("llava")
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    good, bad = picture(1, 40, 40), picture(2, 40, 40)
    prompt = f"See {IMAGE_TOKEN}"
    expected_token_ids = generate_tokens(
        llm, [{"prompt": prompt, "multi_modal_data": {"image": good}}]
    )
    llm.reset_prefix_cache()
    engine = llm.llm_engine
    marked = engine.media_processor().prepare(bad).tensors["pixel_values"]
    model = engine.core.executor.worker.loaded.model
    encode = model.encode

    def failing(kind: str, tensors: Any) -> Any:
        if (tensors["pixel_values"] == marked).all():
            raise RuntimeError("The encoder broke.")
        return encode(kind, tensors)

    monkeypatch.setattr(model, "encode", failing)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for name, image in (("bad", bad), ("good", good)):
        engine.add_request(name, {"prompt": prompt, "multi_modal_data": {"image": image}}, params)
    results = {}
    while engine.has_unfinished_requests():
        results |= {result.request_id: result for result in engine.step()}
    assert list(results["good"].outputs[0].token_ids) == expected_token_ids[0]
    assert "The encoder broke." in str(results["bad"].error)
    engine.core.check_integrity()


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ({"prompt": "none", "multi_modal_data": {"image": [picture(1, 9, 9)]}}, "prompt"),
        ({"prompt": IMAGE_TOKEN, "multi_modal_data": {"video": 1}}, "multi_modal_data"),
        ({"prompt": IMAGE_TOKEN, "multi_modal_data": {"image": ["x"]}}, "multi_modal_data"),
        *(
            (
                {
                    "prompt": IMAGE_TOKEN,
                    "multi_modal_data": {"image": picture(1, 9, 9)},
                    "multi_modal_uuids": uuids,
                },
                "multi_modal_uuids",
            )
            for uuids in ({"image": ["a", "b"]}, {"image": [5]}, {"video": ["a"]}, ["a"])
        ),
        ({"prompt": "x", "multi_modal_uuids": {"image": ["a"]}}, "multi_modal_uuids"),
        (
            {
                "prompt_token_ids": [5, 6],
                "multi_modal_data": {"image": picture(1, 9, 9)},
            },
            "prompt",
        ),
    ],
)
def test_pictures_that_cannot_be_placed_are_refused_by_field(
    family: Callable[[str], tuple[Path, Any, Any]], prompt: dict[str, Any], param: str
) -> None:
    llm = LLM(str(family("llava")[0]), dtype="float32", num_gpu_blocks_override=64)
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(prompt)
    assert refused.value.param == param
    llm.llm_engine.core.check_integrity()


def test_a_pictures_name_is_a_hint_and_its_content_tells_it_apart(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    llm = LLM(str(family("llava")[0]), dtype="float32", num_gpu_blocks_override=64)
    prompts = [
        {"prompt": f"{IMAGE_TOKEN} What?", "multi_modal_data": {"image": picture(seed, 9, 9)}}
        for seed in (1, 2)
    ]
    expected_token_ids = generate_tokens(llm, prompts)
    assert expected_token_ids[0] != expected_token_ids[1]
    for uuids in ("a", ["a"], [None]):
        named = [prompt | {"multi_modal_uuids": {"image": uuids}} for prompt in prompts]
        assert generate_tokens(llm, named) == expected_token_ids


def test_names_are_counted_by_item_however_these_are_given() -> None:
    frames = [picture(seed, 9, 9) for seed in (1, 2, 3)]
    sound = np.zeros(160, dtype=np.float32), 16_000
    for data, names in (
        ({"image": tuple(frames)}, {"image": ["a", None, "c"]}),
        ({"video": frames}, {"video": "a"}),  # one video
        ({"video": [frames, frames]}, {"video": ["a", "b"]}),
        ({"audio": sound}, {"audio": ["a"]}),
    ):
        _check_uuids(names, data)
    with pytest.raises(InvalidRequest, match="each item"):
        _check_uuids({"video": ["a", "b", "c"]}, {"video": frames})


def test_limit_mm_per_prompt_bounds_the_pictures_of_a_prompt(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    folder, one = str(family("llava")[0]), picture(1, 9, 9)
    llm = LLM(folder, num_gpu_blocks_override=64, limit_mm_per_prompt={"image": 1})
    generate_tokens(llm, [{"prompt": IMAGE_TOKEN, "multi_modal_data": {"image": one}}])
    with pytest.raises(InvalidRequest, match="at most 1 images"):
        llm.generate({"prompt": IMAGE_TOKEN * 2, "multi_modal_data": {"image": [one, one]}})
    for limit in ({"image": -1}, {"image": True}, {"picture": 1}):
        with pytest.raises(ConfigError) as refused:
            LLM(folder, limit_mm_per_prompt=limit)
        assert refused.value.param == "limit_mm_per_prompt"


def test_steps_larger_than_the_rotary_tables_spare_rows_are_refused(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    with pytest.raises(ConfigError, match="at most 8192") as refused:
        LLM(str(family("qwen2_vl")[0]), max_num_batched_tokens=8193)
    assert refused.value.param == "max_num_batched_tokens"


def test_a_model_of_text_refuses_pictures(model_folder: Callable[[str], Path]) -> None:
    llm = LLM(str(model_folder("llama")), num_gpu_blocks_override=64)
    with pytest.raises(InvalidRequest, match="no images") as refused:
        llm.generate({"prompt": "x", "multi_modal_data": {"image": picture(1, 9, 9)}})
    assert refused.value.param == "multi_modal_data"


def _count_encodings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds that the model encodes from now on."""
    model = llm.llm_engine.core.executor.worker.loaded.model
    encode, encoded = model.encode, list[str]()

    def counted(kind: str, tensors: Any) -> Any:
        encoded.append(kind)
        return encode(kind, tensors)

    monkeypatch.setattr(model, "encode", counted)
    return encoded


def test_newlines_around_a_picture_are_tokenized_as_one_run() -> None:
    class Newlines:
        """1, 2 and 3 newlines are a token each, and other characters."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            runs = re.findall(r"\n{1,3}|.", text)
            return [len(run) if run[0] == "\n" else ord(run) for run in runs]

        def decode(self, ids: Iterable[int]) -> str:
            return "".join("\n" * token if token < 4 else chr(token) for token in ids)

    tokenizer = Newlines()
    media = SimpleNamespace(
        kind="image", placeholder_id=ord("<"), replacement="\n\n<**>\n\n", wrapper=()
    )
    for text in ("u\n<a", "<\n\nb", "a<", "\n<\n", "a\n\n< b"):
        prompt = tokenizer.encode(text)
        expanded, order = expand_placeholders(prompt, [media], tokenizer)  # type: ignore[list-item]
        assert order == [0]
        assert expanded == tokenizer.encode(text.replace("<", media.replacement))


def test_a_step_must_hold_a_picture_whose_tokens_see_each_other(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    folder, _, _ = family("gemma3")
    with pytest.raises(ConfigError, match="16 tokens of an image") as refused:
        LLM(str(folder), max_num_batched_tokens=15)
    assert refused.value.param == "max_num_batched_tokens"
    with pytest.raises(ConfigError, match="bidirectional spans not supported"):
        LLM(str(folder), attention_backend="TORCH_SDPA")


@pytest.mark.parametrize("count", [0, -4, None, 15, 9])
def test_gemma3_with_another_number_of_tokens_than_its_patches_is_refused(
    family: Callable[[str], tuple[Path, Any, Any]], tmp_path: Path, count: int | None
) -> None:
    folder, _, _ = family("gemma3")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mm_tokens_per_image": count}))
    with pytest.raises(ModelLoadError, match=f"8 x 8 patches; got {count}") as refused:
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
    assert refused.value.param == "mm_tokens_per_image"


def test_gemma3_gives_the_same_tokens_without_compiled_kernels(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    folder, _, _ = family("gemma3")
    prompts = picture_prompts("gemma3")
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 256}
    compiled, baseline_llm = (
        LLM(str(folder), **options),
        LLM(str(folder), **options, cpu_kernels=False),
    )
    assert generate_tokens(compiled, prompts) == generate_tokens(baseline_llm, prompts)


def test_offline_chats_take_images_in_all_of_their_parts(
    family: Callable[[str], tuple[Path, Any, Any]],
) -> None:
    folder, _, _ = family("llava")
    image, file = picture(1, 60, 40), io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"image_url": url},
        {"type": "image_pil", "image_pil": image},
        {"type": "image", "image": image},
    ]
    chats: list[Any] = [
        [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}] for part in parts
    ]
    prompt = f"<|im_start|>user\n{IMAGE_TOKEN}What?<|im_end|>\n<|im_start|>assistant\n"
    request = {"prompt": prompt, "multi_modal_data": {"image": image}}
    [expected_ids] = generate_tokens(llm, [request])
    results = llm.chat(chats, params, use_tqdm=False)
    assert [list(result.outputs[0].token_ids) for result in results] == [expected_ids] * len(parts)
    for part in (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a picture.png"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    ):
        with pytest.raises(InvalidRequest) as refused:
            llm.chat([{"role": "user", "content": [part]}], params, use_tqdm=False)
        assert refused.value.param == "messages"


@pytest.mark.parametrize("name", ["idefics3", "internvl"])
def test_tiles_encoded_a_few_at_a_time_have_the_same_bits(
    family: Callable[[str], tuple[Path, Any, Any]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = family(name)
    tensors = MediaProcessor(folder).prepare(picture(2, 100, 50)).tensors
    assert tensors["pixel_values"].reshape(-1, 3, 28, 28).shape[0] > 2
    model: Any = LLM(
        str(folder), dtype="float32", num_gpu_blocks_override=16
    ).core.executor.worker.loaded.model
    vectors = model.encode("image", tensors)
    monkeypatch.setattr("engine.models.vision.tower._ITEMS_AT_ONCE", 2)
    assert torch.equal(model.encode("image", tensors), vectors)
