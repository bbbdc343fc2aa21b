"""Answers of the demo model that sees when tokens of its pictures are dropped.

python -m benchmarks.picture_pruning [--model DIR] [--each N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

from demo.vision.evaluate import MAX_TOKENS, SEED
from demo.vision.pictures import KINDS, draw
from demo.vision.train import IMAGE
from engine import LLM, SamplingParams

RATES = (0.0, 0.25, 0.5, 0.75)


def prompts_of(kind: str, count: int) -> tuple[list[Any], list[str]]:
    """The held-out pictures of `demo.vision.evaluate` as prompts, and the right answers."""
    rng = Random(f"{SEED} {kind}")
    prompts, answers = [], []
    for _ in range(count):
        picture = draw(kind, rng, "test")
        question, answer = picture.questions[0]
        text = f"<|im_start|>user\n{IMAGE}{question}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append({"prompt": text, "multi_modal_data": {"image": picture.image}})
        answers.append(answer)
    return prompts, answers


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("demo/vision/model"))
    parser.add_argument("--each", type=int, default=100, help="pictures of a kind")
    options = parser.parse_args()
    questions = {kind: prompts_of(kind, options.each) for kind in KINDS}
    print(f"{'':12}", *(f"{rate:>6.0%}" for rate in RATES))
    right: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for rate in RATES:
        llm = LLM(
            str(options.model), dtype="float32", image_pruning_rate=rate, disable_log_stats=True
        )
        for kind, (prompts, answers) in questions.items():
            params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
            results = llm.generate(prompts, params, use_tqdm=False)
            texts = [result.outputs[0].text for result in results]
            num_right = sum(a == b for a, b in zip(texts, answers, strict=True))
            right[kind].append(num_right / options.each)
    for kind, shares in right.items():
        print(f"{kind:12}", *(f"{share:6.0%}" for share in shares))


if __name__ == "__main__":
    main()
