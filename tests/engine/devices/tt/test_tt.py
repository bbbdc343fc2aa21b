"""Tenstorrent's models behind their vLLM interface, on a stand-in for ttnn: no chip is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import MllamaConfig, MllamaImageProcessorPil

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError, ModelLoadError
from engine.contract.sampling_params import StructuredOutputsParams
from engine.devices import registry
from engine.models.registry import ModelRegistry
from tests.engine.devices.tt import fake_ttnn
from tests.engine.models import Oracle, make_model
from tests.engine.multimodal import models as vision_models
from tests.engine.multimodal.models import expected, picture
from tests.packages import EXAMPLE

PACKAGE = EXAMPLE.parents[3] / "packages" / "tt"
ARCHITECTURE = "TTLlamaForCausalLM"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5], [9, 8, 7] * 9, [60, 61, 62], list(range(3, 20)), [9, 8, 7] * 9 + [4]]
RAN = fake_ttnn.CausalLM.ran
LAST = fake_ttnn.CausalLM.last


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package's module, with the stand-in as ttnn."""
    monkeypatch.setitem(sys.modules, "ttnn", fake_ttnn)
    monkeypatch.syspath_prepend(str(PACKAGE))
    import quire_tt

    find_spec = quire_tt.importlib.util.find_spec
    monkeypatch.setattr(
        quire_tt.importlib.util,
        "find_spec",
        lambda name: True if name == "ttnn" else find_spec(name),
    )
    monkeypatch.setattr(registry, "device_class", lambda name: quire_tt.TTDevice)
    monkeypatch.delenv("MESH_DEVICE", raising=False)
    for record in (RAN, LAST, fake_ttnn.calls):
        record.clear()
    register(fake_ttnn.CausalLM)
    yield quire_tt
    ModelRegistry.unregister_model(ARCHITECTURE)


def register(kind: type) -> None:
    ModelRegistry.register_model(ARCHITECTURE, kind)


def make(folder: Path, options: dict[str, Any] | None = None, **settings: Any) -> LLM:
    # `device` is "cpu" so that the settings don't look for an installed package.
    defaults = {
        "dtype": "float32", "num_gpu_blocks_override": 60, "max_model_len": 64, "max_num_seqs": 4,
        "block_size": 8, "device": "cpu", "additional_config": options and {"tt": options},
    }  # fmt: skip
    return LLM(str(folder), **{**defaults, **settings})


def answers(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", [fake_ttnn.CausalLM, fake_ttnn.AsyncCausalLM])
def test_prompts_or_decodes_give_the_tokens_of_transformers(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle], kind: type
) -> None:
    register(kind)
    llm = make(model_folder("llama"))
    assert answers(llm) == oracle("llama").greedy_all(PROMPTS, 6)
    assert set(RAN) == {("prefill", "host"), ("decode", "host")}
    is_async = kind is fake_ttnn.AsyncCausalLM
    assert LAST["decode_forward"] == (True, not is_async)
    assert LAST.get("process_decode_output_host", True) is not is_async
    assert LAST["warmup_model_prefill"] == (True, [None])
    llm.core.check_integrity()
    llm.core.shutdown()


def test_the_mesh_is_opened_and_closed_with_its_links(model_folder: Callable[[str], Path]) -> None:
    make(model_folder("llama")).core.shutdown()
    assert fake_ttnn.calls == [
        ("set_fabric_config", ("FABRIC_1D",)),
        ("open_mesh_device", ((1, 2), {"trace_region_size": 50_000_000})),
        ("close_mesh_device", (1, 2)),
        ("set_fabric_config", ("DISABLED",)),
    ]


def test_options_reach_the_mesh_and_the_model(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    register(fake_ttnn.LimitedCausalLM)
    monkeypatch.setenv("MESH_DEVICE", "(2, 1)")
    options = {
        "trace_mode": "none", "optimizations": "accuracy", "worker_l1_size": 1344544,
        "l1_small_size": 768, "fabric_config": "FABRIC_1D_RING", "dispatch_core_axis": "col",
        "fabric_reliability_mode": "RELAXED_INIT", "enable_model_warmup": False,
    }  # fmt: skip
    llm = make(model_folder("llama"), options)
    answers(llm)
    column = fake_ttnn.DispatchCoreConfig(fake_ttnn.DispatchCoreAxis.COL)
    sizes = {"worker_l1_size": 1344544, "l1_small_size": 768, "dispatch_core_config": column}
    assert fake_ttnn.calls == [
        ("set_fabric_config", ("FABRIC_1D_RING", "RELAXED_INIT")),
        ("open_mesh_device", ((2, 1), sizes)),
    ]
    assert LAST["decode_forward"][0] is False
    assert LAST["initialize_vllm_model"]["optimizations"] == "accuracy"
    assert LAST["max_seq_len"] == 64
    assert "warmup_model_prefill" not in LAST


def test_prompts_are_traced_where_the_options_say_so(model_folder: Callable[[str], Path]) -> None:
    make(model_folder("llama"), {"trace_mode": "decode_only"})
    assert LAST["warmup_model_prefill"] == (False, [None])


def test_a_batch_takes_increasing_lengths(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"))
    prompts = [[5 + index % 7 for index in range(length)] for length in (1, 7, 8, 9, 31, 32, 58)]
    assert answers(llm, prompts) == oracle("llama").greedy_all(prompts, 6)


def test_a_preempted_sequence_is_prefilled_again(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"), num_gpu_blocks_override=8)
    assert answers(llm) == oracle("llama").greedy_all(PROMPTS, 6)
    assert llm.core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("kind", [fake_ttnn.CausalLM, fake_ttnn.CachingCausalLM])
def test_prefixes_are_cached_where_the_model_supports_it(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle], kind: type
) -> None:
    register(kind)
    llm = make(model_folder("llama"))
    expected = oracle("llama").greedy_all(PROMPTS, 6)
    assert [answers(llm), answers(llm)] == [expected, expected]
    assert (llm.core.scheduler.kv.num_hit_tokens > 0) is (kind is fake_ttnn.CachingCausalLM)


@pytest.mark.parametrize("num_blocks", [60, 12])
@pytest.mark.parametrize("kind", [fake_ttnn.CachingCausalLM, fake_ttnn.AsyncCausalLM])
def test_a_sequence_stays_in_its_data_parallel_group(
    model_folder: Callable[[str], Path],
    oracle: Callable[[str], Oracle],
    num_blocks: int,
    kind: type,
) -> None:
    register(kind)
    prompts = [*PROMPTS, *([token, 7, token] for token in range(30, 37))]
    settings = {"max_num_seqs": 6, "num_gpu_blocks_override": num_blocks}
    llm = make(model_folder("llama"), {"data_parallel": 2}, **settings)
    lengths = [SamplingParams(temperature=0, max_tokens=2 + n % 5) for n in range(len(prompts))]
    expected = oracle("llama").greedy_all(prompts, 6)
    tokens = answers(llm, prompts, lengths)
    assert tokens == [row[: len(ours)] for row, ours in zip(expected, tokens, strict=True)]
    assert answers(llm, prompts) == expected
    assert LAST["initialize_vllm_model"]["tt_data_parallel"] == 2
    assert LAST["initialize_vllm_model"]["max_batch_size"] == 6


@pytest.mark.parametrize("mode", ["all", "decode_only"])
@pytest.mark.parametrize("kind", [fake_ttnn.CausalLM, fake_ttnn.AsyncCausalLM])
def test_tokens_are_sampled_on_the_device_where_the_options_say_so(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle], mode: str, kind: type
) -> None:
    register(kind)
    llm = make(model_folder("llama"), {"sample_on_device_mode": mode, "data_parallel": 2})
    assert answers(llm) == oracle("llama").greedy_all(PROMPTS, 6)
    first = "device" if mode == "all" else "host"
    assert set(RAN) == {("prefill", first), ("decode", "device")}
    _, sampling = LAST["warmup_model_prefill"]
    assert [entry and entry.temperature for entry in sampling] == (
        [[0.0], [1.0], None] if mode == "all" else [None]
    )
    random = SamplingParams(temperature=1.5, top_k=40, top_p=0.9, max_tokens=6, ignore_eos=True)
    assert {len(tokens) for tokens in answers(llm, params=random)} == {6}


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"logprobs": 2},
        {"logit_bias": {5: 1.0}},
        {"min_p": 0.1, "temperature": 1.0},
        {"min_tokens": 3, "ignore_eos": False},
        {"structured_outputs": StructuredOutputsParams(regex="[0-9]{6}")},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_batch_that_asks_for_more_is_sampled_on_the_host(
    model_folder: Callable[[str], Path], changes: dict[str, Any]
) -> None:
    llm = make(model_folder("llama"), {"sample_on_device_mode": "all"})
    params = SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **changes})
    answers(llm, PROMPTS[:1], params)
    assert set(RAN) == {("prefill", "host"), ("decode", "host")}
    RAN.clear()
    answers(llm, PROMPTS[:3], [GREEDY, params, GREEDY])
    assert ("decode", "host") in RAN
    answers(llm, PROMPTS[:1])
    assert RAN[-1] == ("decode", "device")


def test_penalties_and_seeds_are_the_hosts(model_folder: Callable[[str], Path]) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, repetition_penalty=1.3, max_tokens=6, ignore_eos=True, logprobs=2
    )
    llm = make(model_folder("llama"), {"always_compat_sampling": True})
    together = llm.generate(PROMPTS, params, use_tqdm=False)
    isolated_outputs = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in PROMPTS]
    assert [result.outputs[0].token_ids for result in together] == [
        result.outputs[0].token_ids for result in isolated_outputs
    ]


def test_prompt_logprobs_fail_by_a_sentence_and_cost_others_nothing(
    model_folder: Callable[[str], Path], oracle: Callable[[str], Oracle]
) -> None:
    llm = make(model_folder("llama"))
    scored = GREEDY.clone()
    scored.prompt_logprobs = 1
    first, second = llm.generate(PROMPTS[1:3], [scored, GREEDY], use_tqdm=False)
    assert "prompt_logprobs aren't available" in str(first.error)
    assert list(second.outputs[0].token_ids) == oracle("llama").greedy_all(PROMPTS[2:3], 6)[0]


def test_pictures_are_given_to_the_model_as_pixel_values(tmp_path: Path) -> None:
    model, processor = vision_models.llava(tmp_path)
    architecture = "TTLlavaForConditionalGeneration"
    ModelRegistry.register_model(architecture, fake_ttnn.VisionLM)
    try:
        llm = make(tmp_path, max_model_len=128, num_gpu_blocks_override=100)
    finally:
        ModelRegistry.unregister_model(architecture)
    images = [picture(seed, 40, 30) for seed in (1, 2)]
    texts = ["Two <image> and <image>?", "No picture here", "One <image>"]
    pictures = [images, [], images[1:]]
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": row}} if row else {"prompt": text}
        for text, row in zip(texts, pictures, strict=True)
    ]
    assert answers(llm, prompts) == [
        expected(model, processor, text, row, 6) for text, row in zip(texts, pictures, strict=True)
    ]


def make_mllama(folder: Path) -> None:
    """A config of an encoder-decoder; its text model is a Llama of its own folder."""
    image = "<|image|>"
    tokenizer = vision_models.tokenizer_with(image)
    token_id = tokenizer.convert_tokens_to_ids(image)
    make_model("llama", folder / "text", vocab_size=len(tokenizer))
    text = json.loads((folder / "text" / "config.json").read_text())
    for name in ("architectures", "model_type"):
        text.pop(name)
    config = MllamaConfig(text_config=text, image_token_index=token_id)
    config.architectures = ["MllamaForConditionalGeneration"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    MllamaImageProcessorPil().save_pretrained(folder)


@pytest.mark.parametrize("options", [{}, {"data_parallel": 2}])
def test_an_encoder_decoder_attends_to_its_slots_picture(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    make_mllama(tmp_path)
    architecture = "TTMllamaForConditionalGeneration"
    ModelRegistry.register_model(architecture, fake_ttnn.CrossModel)
    try:
        llm = make(tmp_path, options, num_gpu_blocks_override=16)
    finally:
        ModelRegistry.unregister_model(architecture)
    oracle = Oracle(tmp_path / "text")
    texts = ["<|image|>What?", "Text alone", "And <|image|> so?", "<|image|>", "<|image|>Other"]
    images = [None if "<" not in text else picture(seed, 9, 7) for seed, text in enumerate(texts)]
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": image}} if image else {"prompt": text}
        for text, image in zip(texts, images, strict=True)
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    picture_prefixes = [
        [] if image is None else fake_ttnn.picture_tokens(image) for image in images
    ]
    expected_tokens = oracle.greedy_all(
        [
            tokens + output.prompt_token_ids
            for tokens, output in zip(picture_prefixes, outputs, strict=True)
        ],
        6,
    )
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected_tokens


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("T3K", "has 8 chips"),
        ("(2,4)", "has 8 chips"),
        ("N151", "must be one of N150"),
        ("(0,2)", "must be one of N150"),
        ("(1,2,3)", "must be one of N150"),
    ],
)
def test_a_mesh_that_is_not_there_is_refused(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.setenv("MESH_DEVICE", name)
    with pytest.raises(ConfigError, match=words) as raised:
        make(model_folder("llama"))
    assert raised.value.param == "MESH_DEVICE"


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"trace_mode": "some"}, "additional_config", "tt.trace_mode"),
        ({"data_parallel": 0}, "additional_config", "tt.data_parallel"),
        ({"data_parallel": 3}, "max_num_seqs", "a multiple of tt.data_parallel"),
        ({"l1_small_size": "much"}, "additional_config", "tt.l1_small_size"),
        ({"rank_binding": "a.yaml"}, "additional_config", "has rank_binding, which the device tt"),
        ({"fabric_config": "FABRIC_9D"}, "additional_config", "a name of ttnn.FabricConfig"),
        ({"sample_on_device_mode": "all"}, "additional_config", "LM doesn't sample"),
    ],
)
def test_an_option_that_cant_be_is_refused_by_name(
    model_folder: Callable[[str], Path], options: dict[str, Any], param: str, words: str
) -> None:
    register(fake_ttnn.HostSampledCausalLM)
    with pytest.raises(ConfigError, match=words) as raised:
        make(model_folder("llama"), options)
    assert raised.value.param == param


def test_an_architecture_without_a_registered_model_is_refused(
    model_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(ModelLoadError, match="No Tenstorrent model is registered for TTQwen2"):
        make(model_folder("qwen2"))


def test_a_model_without_methods_is_refused_by_their_names(
    model_folder: Callable[[str], Path],
) -> None:
    register(fake_ttnn.Unfinished)
    with pytest.raises(ModelLoadError, match="lacks initialize_vllm_model, allocate_kv_cache"):
        make(model_folder("llama"))
