"""Models with states or latents: what cached states cost, and decoding beside llama.cpp.

    python -m benchmarks.states make mamba2 FOLDER
    python -m benchmarks.states idle FOLDER
    python -m benchmarks.states turn12 FOLDER ATTENTION_FOLDER [--at-once]
    python -m benchmarks.states decode FOLDER --gguf FILE --llama-bench PROGRAM [--depth 4096]

`make` writes a random checkpoint of a published model's shape in bfloat16, with a tokenizer, which
llama.cpp's `convert_hf_to_gguf.py` reads. `idle`: time and processor time of cold prompts with a
prefix cache over those without, in one engine. `turn12`: first tokens of chats' twelfth turns over
those of an attention model, which has as many new tokens. `llama` has as many parameters in its
layers as `mamba2`, `llama_granite4` as `granite4` and so on, within 2 %.
`decode`: tokens/s of one stream, and llama.cpp's. All take turns; printed are medians with
quartiles. Weights are int8 (llama.cpp: Q8_0) in `decode`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from engine.contract.messages import EngineRequest
from engine.core.engine_core import EngineCore

#: Fields of config.json for `transformers`, by name.
SHAPES: dict[str, dict[str, Any]] = {
    "mamba2": {
        "model_type": "mamba2", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 128,
        "num_heads": 24, "head_dim": 64, "n_groups": 1, "tie_word_embeddings": True,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", "hidden_size": 1024, "num_hidden_layers": 36,
        "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
    },
    # V2 Lite with V2's latent of queries: llama.cpp reads it without one by 27 layers only.
    "deepseek_v2": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 4,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "scoring_func": "softmax",
    },
    "granite4": {
        "model_type": "granitemoehybrid", "hidden_size": 768, "num_hidden_layers": 32,
        "layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        "shared_intermediate_size": 2048, "num_local_experts": 0, "num_experts_per_tok": 0,
        "num_attention_heads": 12, "num_key_value_heads": 4, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "intermediate_size": 6656, "conv_L_cache": 3,
        "num_attention_heads": 16, "num_key_value_heads": 8,
    },
    # As many parameters in its layers as Mamba-2's above.
    "llama": {
        "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 12,
        "intermediate_size": 2560, "num_attention_heads": 12, "num_key_value_heads": 4,
    },
    **{
        f"llama_{hybrid}": {
            "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": layers,
            "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
        }
        for hybrid, layers in (("granite4", 23), ("lfm2", 25), ("falcon_h1", 40))
    },
}  # fmt: skip
VOCAB, MAX_TOKENS = 32000, 16384
PROMPT, NEW_TOKENS, ANSWER = 512, 64, 16
#: Prompts with cached states that fill `idle`'s pool, of 13 checkpoints.
WARM_TURNS = 8


def make(name: str, folder: Path) -> None:
    """Write a checkpoint with random weights."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    fields = dict(SHAPES[name])
    config = AutoConfig.for_model(
        fields.pop("model_type"), **fields, vocab_size=VOCAB, max_position_embeddings=MAX_TOKENS,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    letters = pre_tokenizers.ByteLevel.alphabet()
    words = ["<bos>", "<eos>", "<pad>", *letters]
    pairs = (a + b for a, b in itertools.product(letters, letters))
    merges = list(itertools.islice(pairs, VOCAB - len(words)))
    vocab = {word: index for index, word in enumerate([*words, *merges])}
    tokenizer = Tokenizer(models.BPE(vocab, [(word[0], word[1]) for word in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(words[:3])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def make_llm(folder: Path, **settings: Any) -> LLM:
    """An engine of two threads."""
    defaults = {"skip_tokenizer_init": True, "max_num_seqs": 8, "num_threads": 2}
    return LLM(str(folder), **{**defaults, "max_model_len": MAX_TOKENS, **settings})


def generate(llm: LLM, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Greedy tokens, and when each came after the start, in seconds."""
    core: EngineCore = llm.core
    tokens: list[int] = []
    times: list[float] = []
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    start = time.perf_counter()
    core.add_request(
        EngineRequest(request_id="0", gateway_id="", prompt_token_ids=prompt, sampling=params)
    )
    while core.has_work:
        for delta in core.step():
            tokens += delta.token_ids
            times.append(time.perf_counter() - start)
    return tokens, times


def random_tokens(source: random.Random, count: int) -> list[int]:
    """Ordinary token ids."""
    return source.choices(range(300, VOCAB), k=count)


def spread(values: Sequence[float]) -> str:
    """The median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def in_turns(turns: int, a: Callable[[int], float], b: Callable[[int], float]) -> list[float]:
    """a / b of each turn, in alternating order. A first turn isn't counted."""
    ratios = []
    for turn in range(turns + 1):
        if turn % 2:
            first = a(turn)
            second = b(turn)
        else:
            second = b(turn)
            first = a(turn)
        ratios.append(first / second)
    return ratios[1:]


def idle(folder: Path, turns: int) -> None:
    """Cold prompts, which nobody shares, with and without a cache of states.

    One engine runs them all: two with the same settings differ by up to 1 %, by where their memory
    is. The pool is full, as a server's soon is: no page is written for the first time.
    """
    clocks = (time.perf_counter, time.process_time)
    ratios: list[list[float]] = [[] for _ in clocks]
    llm = make_llm(folder, enable_prefix_caching=True, cpu_kvcache_space=0.25)
    core: EngineCore = llm.core
    for turn in range(WARM_TURNS + turns):
        seconds = {}
        for caches in (True, False) if turn % 2 else (False, True):
            core.scheduler.kv.enable_caching = caches
            prompt = random_tokens(random.Random(f"{turn} {caches}"), PROMPT)
            starts = [clock() for clock in clocks]
            generate(llm, prompt, NEW_TOKENS)
            seconds[caches] = [clock() - start for clock, start in zip(clocks, starts, strict=True)]
        if turn >= WARM_TURNS:
            for index, values in enumerate(ratios):
                values.append(seconds[True][index] / seconds[False][index])
    for clock, values in zip(clocks, ratios, strict=True):
        print(f"idle, {clock.__name__}: {spread(values)}", flush=True)


def first_token_of_turn(llm: LLM, turn: int, seed: int, at_once: bool) -> float:
    """Seconds to the first token of a chat's last of so many turns, those before it as one prompt
    if `at_once`.
    """
    source, text, times = random.Random(seed), [], [0.0]
    if at_once:
        text, turn = random_tokens(source, (turn - 2) * (NEW_TOKENS + ANSWER)), 2
    for _ in range(turn):
        text += random_tokens(source, NEW_TOKENS)
        answer, times = generate(llm, text, ANSWER)
        text = [*text, *answer]
    return times[0]


def serve(folder: Path) -> LLM:
    """An engine whose pages are mapped before they are needed, as a replica's that has idled."""
    llm = make_llm(folder, cpu_kvcache_space=0.5)
    core: EngineCore = llm.core
    core.executor.on_serving()
    time.sleep(5)
    return llm


def turn12(folder: Path, attention: Path, at_once: bool, turns: int) -> None:
    """The twelfth turn's first token, of a model with states over an attention model's."""
    llms = serve(folder), serve(attention)
    ratios = in_turns(
        turns,
        lambda turn: first_token_of_turn(llms[0], 12, turn, at_once),
        lambda turn: first_token_of_turn(llms[1], 12, turn, at_once),
    )
    print(f"first token of turn 12: {spread(ratios)}", flush=True)


def decode(folder: Path, gguf: Path, program: Path, depth: int, turns: int) -> None:
    """Tokens/s of one stream behind `depth` tokens, over llama.cpp's."""
    llm, count, rates = make_llm(folder, quantization="int8"), 32, []
    prompt = random_tokens(random.Random(0), max(depth, 16))

    def ours(turn: int) -> float:
        _, times = generate(llm, prompt, count + 1)
        rates.append(count / (times[-1] - times[0]))
        return rates[-1]

    def theirs(turn: int) -> float:
        options = ["-t", "2", "-p", "0", "-n", str(count), "-d", str(depth), "-r", "1"]
        done = subprocess.run(
            [program, "-m", gguf, *options, "-o", "jsonl"], check=True, capture_output=True
        )
        rate: float = json.loads(done.stdout.splitlines()[-1])["avg_ts"]
        return rate

    ratios = in_turns(turns, ours, theirs)
    print(f"decode at {depth}: {spread(rates)} tokens/s, {spread(ratios)} x llama.cpp", flush=True)


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True)
    builder = parts.add_parser("make")
    builder.add_argument("shape", choices=SHAPES)
    measured = [parts.add_parser(name) for name in ("idle", "turn12", "decode")]
    for part in (builder, *measured):
        part.add_argument("folder", type=Path)
    measured[1].add_argument("attention", type=Path)
    measured[1].add_argument("--at-once", action="store_true", help="eleven turns as one prompt")
    measured[2].add_argument("--gguf", type=Path, required=True)
    measured[2].add_argument("--llama-bench", type=Path, required=True)
    measured[2].add_argument("--depth", type=int, default=0, help="tokens of context")
    for part in measured:
        part.add_argument("--turns", type=int, default=7, help="counted turns")
    options = parser.parse_args()
    if options.part == "make":
        make(options.shape, options.folder)
    elif options.part == "idle":
        idle(options.folder, options.turns)
    elif options.part == "turn12":
        turn12(options.folder, options.attention, options.at_once, options.turns)
    else:
        decode(options.folder, options.gguf, options.llama_bench, options.depth, options.turns)


if __name__ == "__main__":
    main()
