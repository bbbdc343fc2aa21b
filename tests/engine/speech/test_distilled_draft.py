"""A distilled Whisper drafts for its teacher, whose encoder both attend to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from engine import LLM, SamplingParams
from engine.contract.errors import ConfigError
from engine.scheduler import Sequence
from tests.engine.models import make_model
from tests.engine.speech.models import START, expected, make_whisper, sound

NUM_TOKENS = 20
CASES = [
    (sound(1), [START]),
    (sound(2, 0.4), [START, 6]),
    (sound(1), [START, *range(20, 45)]),
    (sound(3), [9, *range(50, 80), START]),
]

pytestmark = pytest.mark.usefixtures("free_drafts")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[list[int]]]:
    """A teacher of three layers, its student of one that says nearly the same, and the teacher's
    tokens of `CASES`.
    """
    root = tmp_path_factory.mktemp("distilled")
    teacher = make_whisper(root / "teacher")
    with torch.no_grad():
        for layer in teacher.model.decoder.layers[1:]:
            for part in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
                part.weight *= 0.02
                part.bias.zero_()
    teacher.save_pretrained(root / "teacher")
    config = tf.WhisperConfig.from_pretrained(root / "teacher", decoder_layers=1)
    student = tf.WhisperForConditionalGeneration(config)
    student.load_state_dict(teacher.state_dict(), strict=False)
    with torch.no_grad():  # its own encoder isn't used
        student.model.encoder.conv1.weight.zero_()
    student.save_pretrained(root / "student")
    tokens = [expected(teacher, samples, prompt, NUM_TOKENS) for samples, prompt in CASES]
    return root / "teacher", root / "student", tokens


def _llm(folder: Path, draft: Path, **settings: Any) -> LLM:
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=16,
        speculative_config={"model": str(draft), "num_speculative_tokens": 4},
        **{"num_gpu_blocks_override": 256} | settings,
    )


def _run(llm: LLM, cases: list[tuple[Any, list[int]]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [
        {"prompt_token_ids": prompt, "multi_modal_data": {"audio": samples}}
        for samples, prompt in cases
    ]
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]


def _acceptance(llm: LLM) -> float:
    stats = llm.llm_engine.core.stats
    accepted = stats.spec_decode_num_accepted_tokens_total
    return accepted / max(1, stats.spec_decode_num_draft_tokens_total)


def test_most_drafts_are_accepted_and_no_token_changes(
    models: tuple[Path, Path, list[list[int]]],
) -> None:
    teacher, student, tokens = models
    llm = _llm(teacher, student, enable_sleep_mode=True)
    for turn in range(2):  # cold, then what both heard before
        assert _run(llm, CASES) == tokens, turn
    assert _acceptance(llm) > 0.6
    llm.sleep(2)
    llm.wake_up()
    assert _run(llm, CASES) == tokens
    assert _acceptance(llm) > 0.6
    llm.llm_engine.core.check_integrity()


def test_sequences_that_come_back_to_other_blocks_are_drafted_for_again(
    models: tuple[Path, Path, list[list[int]]],
) -> None:
    teacher, student, tokens = models
    # A sequence takes 4 blocks of states and up to 4 of tokens.
    small = {"num_gpu_blocks_override": 18, "enable_prefix_caching": False}
    llm = _llm(teacher, student, max_num_batched_tokens=8, **small)
    core = llm.llm_engine.core
    drafts: Any = core.drafter and core.drafter.model
    step, calls, propose, num_elsewhere = core.step, 0, drafts.propose, 0

    def step_with_preemptions() -> Any:
        nonlocal calls
        calls += 1
        return core.preempt_all() if calls % 12 == 0 else step()

    def checked_propose(requests: list[tuple[Sequence, int]]) -> dict[int, list[int]]:
        nonlocal num_elsewhere
        tables = {s.seq_id: [core.scheduler.kv.get_state_blocks(s.seq_id)] for s, _ in requests}
        for seq_id, row in drafts._rows.items():
            num_elsewhere += row.encoder_tables != tables.get(seq_id, row.encoder_tables)
        proposed = propose(requests)
        assert all(drafts._rows[seq_id].encoder_tables == tables[seq_id] for seq_id in proposed)
        return proposed  # type: ignore[no-any-return]

    core.step = step_with_preemptions  # type: ignore[method-assign]
    drafts.propose = checked_propose
    assert _run(llm, CASES * 2) == tokens * 2
    assert core.scheduler.num_preemptions
    assert num_elsewhere
    assert _acceptance(llm) > 0.6
    core.check_integrity()


def test_a_draft_model_that_cannot_read_the_encoders_states_is_refused(
    models: tuple[Path, Path, list[list[int]]], tmp_path: Path
) -> None:
    make_whisper(tmp_path / "narrow", d_model=32)
    make_whisper(tmp_path / "short", max_source_positions=25)
    make_model("llama", tmp_path / "deaf", vocab_size=320)
    for name, text in (
        ("narrow", "50 states of 32 values"),
        ("short", "25 states of 64 values"),
        ("deaf", "don't both attend"),
    ):
        with pytest.raises(ConfigError, match=text) as refused:
            _llm(models[0], tmp_path / name)
        assert refused.value.param == "speculative_config"


@pytest.mark.parametrize(
    "tier",
    [
        {"kv_offloading_size": 0.01},
        {"kv_transfer_config": {"kv_role": "kv_both"}, "kv_offloading_size": 0.01},
    ],
)
def test_states_that_a_tier_would_restore_for_the_model_alone_are_refused(
    models: tuple[Path, Path, list[list[int]]], tier: dict[str, Any]
) -> None:
    """The draft model would go on with what others' sound left in these blocks."""
    teacher, student, _ = models
    with pytest.raises(ConfigError, match="keys and values of an encoder's states") as refused:
        _llm(teacher, student, **tier)
    assert refused.value.param in tier
