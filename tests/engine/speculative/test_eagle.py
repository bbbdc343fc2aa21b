"""EAGLE heads say what their papers' equations say, and change nothing but how fast text comes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine import LLM, LoRARequest, SamplingParams
from engine.contract.errors import ConfigError, ModelLoadError
from engine.scheduler import StepPlan, StepResult
from engine.speculative.heads import method_of
from engine.speculative.heads.eagle import tapped_layers
from engine.speculative.interface import HeadPlan, HeadResult
from engine.worker.compiled_step import CompiledStepRunner
from engine.worker.draft_head_cache import DraftHeadCache
from tests.engine.lora.peft_oracle import make_adapter
from tests.engine.lora.test_peft_equality import ALL, generate
from tests.engine.speculative.eager import eager_model
from tests.engine.speculative.eagle_folders import (
    Equation,
    eagle3_equation,
    eagle3_parts,
    eagle_equation,
    eagle_parts,
    shape,
)
from tests.engine.speculative.head_folders import HIDDEN, write
from tests.engine.speculative.test_equality import make, prompts, run, texts
from tests.survey.tiny import Oracle

pytestmark = pytest.mark.usefixtures("free_drafts")

Folder = Callable[[str], Path]


def drafting(folder: Path, head_folder: Path, method: str = "eagle", **settings: Any) -> LLM:
    config = {"method": method, "model": str(head_folder), "num_speculative_tokens": 4}
    return make(folder, speculative_config=config, **settings)


class Watch:
    """Compares each draft with what the equation says of `transformers`' hidden states."""

    def __init__(self, llm: LLM, equation: Equation, model: Any, bias: dict[int, float]) -> None:
        self.depths: list[int] = []
        #: Tokens and the drafts behind them, of rounds that weren't compared yet. Who says the same
        #: again gets the same drafts, or fewer: those are compared once.
        self._rounds: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        self._core, self._equation, self._model, self._bias = llm.core, equation, model, bias
        drafts = self._core.drafter.model
        self._inner, drafts._run = drafts._run, self._run

    def _run(self, plan: HeadPlan) -> HeadResult:
        result = self._inner(plan)
        texts = {sequence.seq_id: sequence for sequence in self._core.scheduler.running}
        for seq_id, drafts in zip(plan.seq_ids, result.drafts, strict=True):
            sequence = texts[seq_id]
            self._rounds.setdefault(tuple(sequence.token_ids), set()).add(tuple(drafts))
            self.depths.append(len(drafts))
        return result

    @property
    @torch.no_grad()
    def mismatched_lengths(self) -> list[int]:
        """Lengths of the texts whose drafts are other than the equation's, since it was asked.

        Not in a round itself: what fails there ends drafts alone. And behind the longest texts
        first, for states of a text are those of what it goes on with, too.
        """
        lengths: list[int] = []
        cached_states: list[tuple[list[int], torch.Tensor]] = []
        for text, rounds in sorted(
            self._rounds.items(), key=lambda cached_entry: -len(cached_entry[0])
        ):
            seen = list(text[:-1])
            states = next((s for longer, s in cached_states if longer[: len(seen)] == seen), None)
            if states is None:
                states = self.states(seen)
                cached_states.append((seen, states))
            for drafts in rounds:
                if not any(drafts == more[: len(drafts)] for more in rounds - {drafts}):
                    lengths += self._mismatched_lengths(states[: len(seen)], [*text], drafts)
        self._rounds.clear()
        return lengths

    def _mismatched_lengths(
        self, states: torch.Tensor, tokens: list[int], drafts: tuple[int, ...]
    ) -> list[int]:
        counts = []
        for draft in drafts:
            logits = self._equation(states, tokens)
            for token, bias in self._bias.items():
                logits[token] += bias
            if logits.max() - logits[draft] >= 1e-2:
                counts.append(len(tokens))
            tokens.append(draft)
        return counts

    def states(self, tokens: list[int]) -> torch.Tensor:
        return self._model.model(torch.tensor([tokens])).last_hidden_state[0]


class Watch3(Watch):
    def states(self, tokens: list[int]) -> torch.Tensor:
        output = self._model.model(torch.tensor([tokens]), output_hidden_states=True)
        return torch.cat([hidden_state[0] for hidden_state in output.hidden_states[:3]], dim=-1)


def watched(llm: LLM, folder: Path, tensors: dict[str, Any]) -> Watch:
    weights = load_file(folder / "model.safetensors")
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    oracle = Oracle(folder).model
    if "norm.weight" in tensors:
        return Watch3(llm, eagle3_equation(tensors, embedding), oracle, BIAS)
    return Watch(llm, eagle_equation(tensors, embedding, head), oracle, BIAS)


#: Both say what the bias wants, mostly: some drafts hold, some don't.
BIAS = {5: 30.0, 6: 30.0, 7: 28.0}
BIASED = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logit_bias=BIAS)


PARTS = {"eagle": eagle_parts, "eagle3": eagle3_parts}


@pytest.mark.parametrize(
    ("method", "block_size", "kernels"),
    [("eagle", 4, True), ("eagle", 16, False), ("eagle3", 4, True)],
)
def test_drafts_are_the_equations_whatever_was_cached_cut_or_accepted(
    method: str, block_size: int, kernels: bool, model_folder: Folder, tmp_path: Path
) -> None:
    """Prompts are read in pieces, some begin with others' blocks, and rounds follow on rounds of
    which some drafts held.
    """
    folder, (config, tensors) = model_folder("llama"), PARTS[method]()
    llm = drafting(
        folder, write(tmp_path, config, tensors), method, block_size=block_size,
        cpu_kernels=kernels, max_num_batched_tokens=24, max_num_seqs=6,
    )  # fmt: skip
    watch = watched(llm, folder, tensors)
    common = list(range(4, 60))
    asked = [[5, 6, 7], [8], common[:48], [*common, 9], [*common, 9, 9, 8], common[:16]]
    for _ in range(2):
        llm.generate(asked, BIASED, use_tqdm=False)
        llm.generate([[*common[:32], 5], [*common[:16], 7, 7]], BIASED, use_tqdm=False)
    stats = llm.core.snapshot()
    assert len(watch.depths) > 60
    assert not watch.mismatched_lengths
    assert set(watch.depths) <= {1, 2, 3, 4}
    assert max(watch.depths) == 4
    assert stats.prefix_cache_hits_total > 100
    accepted = stats.spec_decode_num_accepted_tokens_total
    assert 20 < accepted < stats.spec_decode_num_draft_tokens_total
    llm.core.check_integrity()


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        *(("eagle", layout) for layout in ("biased", "nested", "speculators")),
        *(("eagle3", layout) for layout in ("wide", "speculators")),
    ],
)
def test_each_published_layout_says_the_same(
    method: str, layout: str, model_folder: Folder, tmp_path: Path
) -> None:
    """In PyTorch's file as well, with a copy of the model's embeddings."""
    folder, (config, tensors) = model_folder("llama"), PARTS[method](layout)
    head_folder = write(tmp_path, config, tensors)
    if method == "eagle":
        embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        torch.save({**tensors, "embed_tokens.weight": embedding}, tmp_path / "pytorch_model.bin")
        (head_folder / "model.safetensors").unlink()
    llm = drafting(folder, head_folder, method)
    watch = watched(llm, folder, tensors)
    llm.generate([[5, 6, 7], list(range(4, 40))], BIASED, use_tqdm=False)
    assert sum(watch.depths) > 40
    assert not watch.mismatched_lengths


@pytest.mark.parametrize(("family", "method"), [("llama", "eagle"), ("qwen2-window", "eagle3")])
def test_every_way_of_choosing_gives_the_same(
    family: str, method: str, model_folder: Folder, tmp_path: Path
) -> None:
    folder, asked = model_folder(family), prompts(random.Random(5))
    baseline = run(make(folder), asked)
    llm = drafting(folder, write(tmp_path, *PARTS[method]()), method)
    for turn in range(2):  # cold, then from the prefix cache
        drafted = run(llm, asked)
        assert texts(drafted) == texts(baseline), turn
        for was, now in zip(baseline, drafted, strict=True):
            assert [completion.logprobs for completion in was.outputs] == [
                completion.logprobs for completion in now.outputs
            ]
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 200


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rows_of_adapters_say_the_same(method: str, model_folder: Folder, tmp_path: Path) -> None:
    folder, head_folder = model_folder("llama"), write(tmp_path / "head", *PARTS[method]())
    adapter_folder = make_adapter(folder, tmp_path / "adapter", target_modules=ALL)
    adapter = LoRARequest("a", 1, str(adapter_folder))
    asked = [(list(range(4, 30)), None), (list(range(5, 25)), adapter), ([9] * 6, adapter)]
    llm = drafting(folder, head_folder, method)
    assert generate(llm, asked) == generate(make(folder), asked)
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 40


@pytest.mark.usefixtures("compiler")
def test_steps_that_check_drafts_are_one_call_for_eagle(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_compiled: list[bool] = []
    inner = CompiledStepRunner.run

    def spy(self: CompiledStepRunner, plan: StepPlan) -> StepResult | None:
        result = inner(self, plan)
        if plan.drafts:
            ran_compiled.append(result is not None)
        return result

    monkeypatch.setattr(CompiledStepRunner, "run", spy)
    llm = drafting(model_folder("llama"), write(tmp_path, *eagle_parts()))
    llm.generate([[5, 6, 7], [8, 9]], BIASED, use_tqdm=False)
    assert len(ran_compiled) > 5
    assert all(ran_compiled)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_preempted_sequences_get_the_equations_drafts_again(
    method: str, model_folder: Folder, tmp_path: Path
) -> None:
    folder, (config, tensors) = model_folder("llama"), PARTS[method]()
    few = {"num_gpu_blocks_override": 24, "max_model_len": 80, "block_size": 4}
    llm = drafting(folder, write(tmp_path, config, tensors), method, **few)
    watch = watched(llm, folder, tensors)
    asked = [list(range(start, start + 17)) for start in range(4, 9)]
    llm.generate(asked, BIASED, use_tqdm=False)
    assert llm.core.scheduler.num_preemptions > 0
    assert sum(watch.depths) > 40
    assert not watch.mismatched_lengths
    llm.core.check_integrity()


@pytest.mark.parametrize(("method", "level"), [("eagle", 1), ("eagle", 2), ("eagle3", 2)])
def test_it_sleeps_with_the_model(
    method: str, level: int, model_folder: Folder, tmp_path: Path
) -> None:
    folder, (config, tensors) = model_folder("llama"), PARTS[method]()
    llm = drafting(folder, write(tmp_path, config, tensors), method, enable_sleep_mode=True)
    prompt = list(range(4, 60))
    initial_outputs = llm.generate([prompt], BIASED, use_tqdm=False)
    llm.sleep(level)
    assert (llm.core.executor.drafts.of_heads._heads is None) == (level == 2)
    llm.wake_up()
    watch = watched(llm, folder, tensors)
    assert texts(llm.generate([prompt], BIASED, use_tqdm=False)) == texts(initial_outputs)
    assert sum(watch.depths) > 20
    assert not watch.mismatched_lengths


def test_heads_that_cannot_follow_end_drafts_alone(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = model_folder("llama"), [[5, 6, 7], [8, 9]]
    llm = drafting(folder, write(tmp_path, *eagle_parts()))

    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(DraftHeadCache, "_follow", fail)
    drafted = llm.generate(asked, BIASED, use_tqdm=False)
    assert texts(drafted) == texts(make(folder).generate(asked, BIASED, use_tqdm=False))
    assert llm.core.stats.spec_decode_num_drafts_total == 0


def test_its_cache_is_counted_with_the_models(model_folder: Folder, tmp_path: Path) -> None:
    space = {"num_gpu_blocks_override": None, "cpu_kvcache_space": 0.001, "max_num_seqs": 64}
    folder = model_folder("llama")
    baseline = make(folder, **space).core.capacity.num_blocks
    llm = drafting(folder, write(tmp_path, *eagle_parts()), **space)
    # 256 bytes a token and layer, of which there are three and one; 16 of a block's last state.
    assert (baseline, llm.core.capacity.num_blocks) == (87, 64)


def test_prompts_of_vectors_and_long_ones_get_no_drafts(
    model_folder: Folder, tmp_path: Path
) -> None:
    config = {"method": "eagle", "model": str(write(tmp_path, *eagle_parts()))}
    llm = make(
        model_folder("llama"), enable_prompt_embeds=True,
        speculative_config={**config, "max_model_len": 32},
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    vectors = {"prompt_embeds": torch.randn(5, HIDDEN)}
    outputs = llm.generate([vectors, {"prompt_token_ids": [5] * 40}], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [12, 12]
    assert llm.core.stats.spec_decode_num_drafts_total == 0
    llm.generate([[5, 6]], params, use_tqdm=False)
    assert llm.core.stats.spec_decode_num_drafts_total > 0


@pytest.mark.parametrize(
    ("changes", "method"),
    [
        ({}, "eagle3"),
        ({"model_type": "eagle"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "eagle3"),
        ({"model_type": "eagle"}, "eagle"),
        ({"speculators_model_type": "eagle"}, "eagle"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
    ],
)
def test_a_config_says_which_it_is(changes: dict[str, Any], method: str) -> None:
    config, _ = PARTS[method]()
    assert method_of({**config, **changes}, "org/some-draft") == method


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("eagle-lovers/llama", ""),
        ("org/beagle", ""),
    ],
)
def test_authors_say_which_it_is_in_the_name_alone(name: str, method: str) -> None:
    assert method_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, name) == method


def test_a_model_alone_says_what_it_is(model_folder: Folder, tmp_path: Path) -> None:
    head_folder = write(tmp_path / "EAGLE-tiny", *eagle_parts())
    llm = make(model_folder("llama"), speculative_config={"model": str(head_folder)})
    assert llm.core.executor.drafts.of_heads._settings.method == "eagle"
    llm.generate([[5, 6, 7]], BIASED, use_tqdm=False)
    assert llm.core.stats.spec_decode_num_draft_tokens_total > 0


@pytest.mark.parametrize(
    ("method", "changes", "says"),
    [
        ("eagle", {"num_hidden_layers": 2}, "it has 2 layers"),
        ("eagle", {"hidden_size": 128}, "hidden_size is 128, the model's is 64"),
        ("eagle", {"vocab_size": 99}, "vocab_size is 99, the model's is 384"),
        ("eagle", {"sliding_window": 32}, "sliding_window is set"),
        ("eagle", {"layernorms": True}, "its inputs are normed"),
        ("eagle", {"num_key_value_heads": 3}, "must be a multiple"),
        ("eagle", {"num_attention_heads": "many"}, "wrong type"),
        ("eagle", {"hidden_act": "magic"}, "hidden_act 'magic'"),
        ("eagle", {"fc.weight": None}, "no 'fc.weight'"),
        ("eagle", {"layers.0.input_layernorm.weight": torch.ones(64)}, "EAGLE's layer has none"),
        ("eagle", {"layers.0.self_attn.k_proj.bias": torch.ones(32)}, "have no bias"),
        ("eagle", {"layers.0.mlp.up_proj.weight": torch.ones(7, 64)}, r"has shape \(7, 64\)"),
        ("eagle3", {"target_hidden_size": 128}, "target_hidden_size is 128"),
        ("eagle3", {"draft_vocab_size": 385}, "draft_vocab_size must be"),
        ("eagle3", {"draft_vocab_size": 7}, r"'d2t' must be \[7\] whole numbers"),
        ("eagle3", {"d2t": None}, "no 'd2t'"),
        ("eagle3", {"d2t": "far"}, "different tokens in"),
        ("eagle3", {"d2t": "same"}, "different tokens in"),
        ("eagle3", {"midlayer.hidden_norm.weight": None}, "hidden_norm"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("eagle3", {"norm_before_residual": 1}, "must be true or false"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "ascending layers of"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}, "ascending layers of"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": "all"}, "ascending layers of"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": None}, r"by default they are \[2, 1, 0\]"),
    ],
)
def test_heads_that_cannot_be_are_refused_by_the_field(
    method: str, changes: dict[str, Any], says: str, model_folder: Folder, tmp_path: Path
) -> None:
    config, tensors = PARTS[method]()
    for name, value in changes.items():
        if value is None and name in tensors:
            del tensors[name]
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        elif name == "d2t":
            tensors[name] = (
                tensors[name] + 400 if value == "far" else -torch.arange(len(tensors[name]))
            )
        else:
            config[name] = value
    with pytest.raises((ModelLoadError, ConfigError), match=says) as caught:
        drafting(model_folder("llama"), write(tmp_path, config, tensors), method)
    assert caught.value.param == "speculative_config"


def test_a_model_that_forgets_tokens_is_refused(model_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="full attention in some layers") as caught:
        drafting(model_folder("mistral"), write(tmp_path, *eagle_parts()))
    assert caught.value.param == "speculative_config"


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (32, (2, 16, 29)), (80, (2, 40, 77))])
def test_the_usual_layers_are_the_papers(
    layers: int, taps: tuple[int, ...], tmp_path: Path
) -> None:
    source = SimpleNamespace(config=shape())
    assert tapped_layers(source, layers) == taps  # type: ignore[arg-type]


def test_a_head_that_is_right_takes_the_model_ahead(tmp_path: Path) -> None:
    folder, head_folder = eager_model(tmp_path)
    llm = drafting(folder, head_folder)
    params = SamplingParams(temperature=0, max_tokens=41, ignore_eos=True)
    asked = [list(range(4, 40)), [9] * 7]
    outputs = llm.generate(asked, params, use_tqdm=False)
    assert texts(outputs) == texts(make(folder).generate(asked, params, use_tqdm=False))
    stats = llm.core.stats
    accepted = stats.spec_decode_num_accepted_tokens_total
    assert accepted > 0.6 * stats.spec_decode_num_draft_tokens_total > 40
