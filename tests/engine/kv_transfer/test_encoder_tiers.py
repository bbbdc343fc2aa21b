"""What encoders make, in the tiers: states that tokens attend to across, vectors of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.engine_config import EngineConfig
from engine.contract.errors import ConfigError, InvalidRequest
from engine.contract.messages import EngineRequest
from engine.core.engine_core import EngineCore
from engine.core.warmup import warm_up
from engine.models.interface import SupportsMultiModal
from engine.models.vision.family import VisionDecoder
from tests.engine.kv_transfer.remote_stores import running_store
from tests.engine.kv_transfer.test_offloading import connector_of, make
from tests.engine.multimodal.models import FAMILIES, IMAGE_TOKEN, picture
from tests.engine.multimodal.test_vision_adapters import TARGETS, train_adapter
from tests.engine.multimodal.test_vision_families import generate_tokens
from tests.engine.speech.models import expected, make_whisper
from tests.engine.speech.test_whisper import (
    CASES,
    NUM_TOKENS,
    _count_encodings,
    _llm,
    _prompts,
    _run,
)

Whisper = tuple[Path, list[list[int]]]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Whisper:
    """A model's folder, and the tokens of `CASES`."""
    folder = tmp_path_factory.mktemp("whisper")
    model = make_whisper(folder)
    return folder, [expected(model, samples, prompt, NUM_TOKENS) for samples, prompt in CASES]


def core_of(llm: LLM) -> EngineCore:
    return llm.llm_engine.core


def forget_kv_cache(llm: LLM) -> None:
    """Empty the KV cache, but no tier."""
    assert core_of(llm).scheduler.kv.reset_prefix_cache()


def test_states_that_left_the_kv_cache_are_loaded_rather_than_encoded(
    whisper: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder, kv_offloading_size=0.01)
    encoded = _count_encodings(llm, monkeypatch)
    assert _run(llm, _prompts()) == expected
    assert len(encoded) == 3  # two of four heard the same
    forget_kv_cache(llm)
    assert _run(llm, _prompts()) == expected
    assert len(encoded) == 3
    assert connector_of(core_of(llm)).num_matched_tokens
    llm.reset_prefix_cache()
    assert _run(llm, _prompts()[:1]) == expected[:1]
    assert len(encoded) == 4
    core_of(llm).check_integrity()


def test_another_replica_loads_states_from_a_folder_and_no_other_tenants(
    whisper: Whisper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, expected = whisper
    settings: Any = {"kv_offloading_size": 0.01, "kv_offloading_backend": str(tmp_path)}
    first = _llm(folder, **settings)
    assert _run(first, _prompts(cache_salt="a")) == expected
    connector_of(core_of(first)).wait_until_saved(60)
    second = _llm(folder, **settings)
    encoded = _count_encodings(second, monkeypatch)
    assert _run(second, _prompts(cache_salt="a")) == expected
    assert not encoded
    assert _run(second, _prompts(cache_salt="b")) == expected
    assert len(encoded) == 3


def test_states_that_have_changed_in_host_memory_are_encoded_again(
    whisper: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder, kv_offloading_size=0.01)
    encoded = _count_encodings(llm, monkeypatch)
    _run(llm, _prompts()[:1])
    forget_kv_cache(llm)
    host = connector_of(core_of(llm)).host
    for payload, _ in host._blocks.values():
        payload[17] ^= 4
    assert _run(llm, _prompts()[:1]) == expected[:1]
    assert len(encoded) == 2
    assert host.failures["checksum"]


def test_states_whose_load_failed_are_encoded_and_not_cached(
    whisper: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder, kv_offloading_size=0.01)
    encoded = _count_encodings(llm, monkeypatch)
    _run(llm, _prompts())
    forget_kv_cache(llm)
    buffers = connector_of(core_of(llm))._buffers
    write = buffers.write_verified

    def fail(*args: Any) -> None:
        monkeypatch.setattr(buffers, "write_verified", write)
        raise OSError("no memory")

    monkeypatch.setattr(buffers, "write_verified", fail)
    assert _run(llm, _prompts()) == expected
    assert len(encoded) > 3
    assert _run(llm, _prompts()) == expected
    core_of(llm).check_integrity()


def test_preempted_sequences_take_their_states_along(
    whisper: Whisper, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = whisper
    llm = _llm(folder, swap_space=0.01)
    core = core_of(llm)
    encoded = _count_encodings(llm, monkeypatch)
    step, calls = core.step, 0

    def step_with_preemptions() -> Any:
        nonlocal calls
        calls += 1
        if calls % 10:
            return step()
        deltas = core.preempt_all()
        core.scheduler.kv.reset_prefix_cache()
        return deltas

    core.step = step_with_preemptions  # type: ignore[method-assign]
    assert _run(llm, _prompts()) == expected
    assert core.scheduler.num_preemptions
    assert len(encoded) == 3
    core.check_integrity()


@pytest.fixture(params=["folder", "redis", "native"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        with running_store("redis", tmp_path) as records:
            yield records.url
    else:
        yield "native" if request.param == "native" else str(tmp_path / "tier")


def seeing(folder: Path, backend: str, **settings: Any) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        num_gpu_blocks_override=256,
        kv_offloading_size=0.01,
        kv_offloading_backend=backend,
        **settings,
    )


def count_pictures(llm: LLM, monkeypatch: pytest.MonkeyPatch, method: str = "encode") -> list[str]:
    """The kinds of what the model encodes from now on."""
    model: SupportsMultiModal = core_of(llm).executor.worker.loaded.model
    encode, kinds = getattr(model, method), list[str]()

    def counted(kind: str, *arguments: Any) -> Any:
        kinds.append(kind)
        return encode(kind, *arguments)

    monkeypatch.setattr(model, method, counted)
    return kinds


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_another_replica_reads_what_an_encoder_made_of_a_picture(
    family: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prompts that have nothing else in common; vectors of Qwen3-VL are longer than tokens'."""
    folder = tmp_path / "model"
    FAMILIES[family](folder)
    image = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>" if "qwen" in family else IMAGE_TOKEN
    one, two = picture(1, 60, 40), picture(2, 90, 40)
    # Up to the picture's end, as the gateway sends it to a replica that encodes.
    first = [{"prompt": IMAGE_TOKEN, "multi_modal_data": {"image": one}}]
    second = [{"prompt": f"See {image}", "multi_modal_data": {"image": one}}]
    other = [{"prompt": f"See {image}", "multi_modal_data": {"image": two}}]
    baseline_llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=256)
    expected_token_ids = [generate_tokens(baseline_llm, prompts) for prompts in (second, other)]

    role = "ec_both" if backend == "native" else "ec_producer"
    encoding = seeing(folder, backend, ec_transfer_config={"ec_role": role})
    encoding.generate(first, SamplingParams(temperature=0, max_tokens=1))
    connector_of(core_of(encoding)).wait_until_saved(60)
    if backend == "native":  # host memory is no other replica's
        reading = encoding
        core_of(reading).scheduler.encoder_cache.drop_unused()
    else:
        reading = seeing(folder, backend, ec_transfer_config={"ec_role": "ec_consumer"})
    kinds = count_pictures(reading, monkeypatch)
    assert generate_tokens(reading, second) == expected_token_ids[0]
    assert not kinds
    assert core_of(reading).snapshot().mm_cache_hits_total == 1
    assert generate_tokens(reading, other) == expected_token_ids[1]
    assert kinds == ["image"]
    core_of(reading).scheduler.kv.reset_prefix_cache()
    core_of(reading).reset_encoder_cache()
    assert generate_tokens(reading, second) == expected_token_ids[0]
    assert kinds == ["image", "image"]


def prefilled(message: EngineRequest) -> EngineRequest:
    return msgspec.structs.replace(message, prefilled=True)


def test_what_an_adapters_tower_made_of_a_picture_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    model, _ = FAMILIES["llava"](folder)
    train_adapter(model, tmp_path / "adapter", TARGETS["llava"])
    adapter = LoRARequest("tower", 1, str(tmp_path / "adapter"))
    image = {"image": picture(1, 60, 40)}

    def generate(llm: LLM, text: str, max_tokens: int = 8) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = {"prompt": f"{text} {IMAGE_TOKEN}", "multi_modal_data": image}
        [result] = llm.generate([request], params, lora_request=[adapter])
        return list(result.outputs[0].token_ids)

    encoding, reading, baseline = (
        seeing(folder, backend, enable_lora=True, ec_transfer_config={"ec_role": role})
        for role, backend in (
            ("ec_producer", str(tmp_path / "tier")),
            ("ec_consumer", str(tmp_path / "tier")),
            ("ec_both", "native"),
        )
    )
    generate(encoding, "A", max_tokens=1)
    connector_of(core_of(encoding)).wait_until_saved(60)
    # As the gateway sends it: what is in the folder by now wasn't there a moment ago.
    core, add_request = core_of(reading), core_of(reading).add_request
    monkeypatch.setattr(
        core, "add_request", lambda message, **options: add_request(prefilled(message), **options)
    )
    kinds = count_pictures(reading, monkeypatch, "encode_with_adapter")
    assert generate(reading, "See") == generate(baseline, "See")
    assert not kinds


def test_a_replica_that_only_encodes_has_no_decoder_and_answers_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    FAMILIES["llava"](folder)
    llm = seeing(
        folder,
        str(tmp_path / "tier"),
        ec_transfer_config={"ec_role": "ec_producer"},
        speculative_config={"method": "ngram", "num_speculative_tokens": 2},
    )
    core = core_of(llm)
    warm_up(core)
    model = core.executor.worker.loaded.model
    assert isinstance(model, VisionDecoder)
    assert [*model.layers, *model.weights, model.decode_bytes] == [0]
    assert [len(cache.keys) for cache in model.kv_caches] == [1] * model.spec.num_layers
    prompt = {"prompt": f"{IMAGE_TOKEN} {IMAGE_TOKEN}"}
    prompt["multi_modal_data"] = {"image": [picture(1, 60, 40), picture(2, 90, 40)]}
    one = SamplingParams(temperature=0, max_tokens=1)
    for _ in range(2):
        [result] = llm.generate([prompt], one)
        assert list(result.outputs[0].token_ids) == [0]
    core.check_integrity()
    with pytest.raises(InvalidRequest, match="ec_role=ec_producer") as refusal:
        llm.generate([prompt], SamplingParams(max_tokens=2))
    assert refusal.value.param == "max_tokens"
    core.config.enable_sleep_mode = True
    core.sleep(2)
    core.wake_up()
    assert core.executor.worker.loaded.model.only_encodes
    llm.generate([prompt], one)


def test_blocks_that_a_replica_only_counts_are_neither_swapped_nor_limited_nor_saved(
    tmp_path: Path,
) -> None:
    folder, role = tmp_path / "model", {"ec_role": "ec_producer"}
    FAMILIES["llava"](folder)
    llm = LLM(
        str(folder),
        dtype="float32",
        num_gpu_blocks_override=1,
        max_model_len=128,
        max_num_batched_tokens=32,
        kv_offloading_size=0.01,
        kv_offloading_backend=str(tmp_path / "tier"),
        ec_transfer_config=role,
        swap_space=0.01,
    )
    core = core_of(llm)
    request = EngineRequest(
        request_id="a", gateway_id="", prompt_token_ids=[5] * 120, tenant="t",
        sampling=SamplingParams(max_tokens=1), kv_max_fraction=0.1,
    )  # fmt: skip
    core.add_request(request)  # within a share of blocks that take no memory
    core.step()
    core.scheduler._runs.preempt(core.scheduler._runs.sequences[0])
    finished: list[str | None] = []
    while core.has_work:
        finished += [delta.finish_reason for delta in core.step()]
    assert finished == ["length"]
    assert not connector_of(core).num_saved_blocks
    config = {"kv_connector": "DictConnector"}
    config["kv_connector_module_path"] = "tests.engine.kv_transfer.outside"
    with pytest.raises(ConfigError, match="no decoder, and so no KV blocks") as refusal:
        seeing(folder, str(tmp_path / "tier"), ec_transfer_config=role, kv_transfer_config=config)
    assert refusal.value.param == "kv_transfer_config"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ec_transfer_config": {"ec_role": "ec_both"}}, "needs a kv_offloading_size"),
        ({"kv_offloading_size": 1, "ec_transfer_config": {"ec_role": "kv_both"}}, "ec_role must"),
        ({"kv_offloading_size": 1, "ec_transfer_config": {"ec_connector": "X"}}, "ec_connector"),
        ({"kv_offloading_size": 1, "ec_transfer_config": {"ec_ip": "::"}}, "no ec_ip"),
    ],
)
def test_settings_of_encoders_outputs_that_cannot_work_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        EngineConfig(model="m", **changes)
    assert refusal.value.param == "ec_transfer_config"


def test_models_without_outputs_for_tokens_are_refused(whisper: Whisper) -> None:
    with pytest.raises(ConfigError, match="no encoder whose outputs stand for tokens") as refusal:
        make(
            whisper[0],
            kv_offloading_size=0.01,
            max_model_len=64,
            ec_transfer_config={"ec_role": "ec_both"},
        )
    assert refusal.value.param == "ec_transfer_config"
