"""Asks the demo model that sees about held-out pictures, and prints how many it answers right.

python -m demo.vision.evaluate --model DIR [--each N]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

import torch
from transformers import LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast

from demo.vision.pictures import KINDS, draw
from demo.vision.train import IMAGE, make_processor

SEED = 2026
MAX_TOKENS = 24


def count_right(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, kind: str, each: int
) -> int:
    """Pictures of this kind that are described to the letter, greedily."""
    rng, right = Random(f"{SEED} {kind}"), 0
    for _ in range(each):
        picture = draw(kind, rng, "test")
        question, answer = picture.questions[0]
        prompt = f"<|im_start|>user\n{IMAGE}{question}<|im_end|>\n<|im_start|>assistant\n"
        inputs = processor(images=picture.image, text=prompt, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        text = processor.tokenizer.decode(
            tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += text == answer
    return right


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--each", type=int, default=100, help="pictures of a kind")
    options = parser.parse_args()
    model = LlavaForConditionalGeneration.from_pretrained(options.model, dtype=torch.float32)
    processor = make_processor(PreTrainedTokenizerFast.from_pretrained(options.model))
    for kind in KINDS:
        right = count_right(model.eval(), processor, kind, options.each)
        print(f"{kind:12} {100 * right / options.each:5.1f} % of {options.each}", flush=True)


if __name__ == "__main__":
    main()
