"""Asks the demo model its held-out questions, and prints how many it answers right.

    python -m demo.evaluate [--model DIR] [--adapter DIR] [--each N] [--errors]

Greedy decoding; an answer counts only if it also ends by itself. With an adapter the share of
answers in its style is printed beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.generator.example import Example
from demo.generator.mixture import TOPICS, draw
from demo.judge import right
from demo.render import render_prompt
from demo.styles import STYLES, Style, restyle

HERE = Path(__file__).parent
SEED = 2026
EACH = 100
BATCH = 50
SHORT_ANSWER, LONG_ANSWER = 64, 280


@dataclass(slots=True)
class Verdict:
    """A question, what the model said to it, and what that is worth."""

    example: Example
    answer: str
    right: bool
    styled: bool | None = None


def questions(each: int) -> list[Example]:
    """The held-out questions: so many a topic, none of them twice."""
    return [example for topic in TOPICS for example in islice(_distinct(topic), each)]


def _distinct(topic: str) -> Iterator[Example]:
    rng, seen = Random(f"{SEED} {topic}"), set()
    for _ in range(100_000):
        example = draw(topic, rng, "test")
        prompt = render_prompt(example)
        if prompt not in seen:
            seen.add(prompt)
            yield example


class Answerer:
    """A model that answers many questions at once."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if adapter:
            from peft import PeftModel

            self._model = PeftModel.from_pretrained(self._model, adapter).eval()
        self._ends = set(self._model.generation_config.eos_token_id)

    def answer(self, examples: list[Example]) -> Iterator[tuple[Example, str, bool]]:
        """Each example, its answer, and whether that ended by itself. Like lengths go together."""
        by_length = sorted(examples, key=lambda example: len(render_prompt(example)))
        for limit in (SHORT_ANSWER, LONG_ANSWER):
            group = [example for example in by_length if _limit(example) == limit]
            for start in range(0, len(group), BATCH):
                yield from self._batch(group[start : start + BATCH], limit)

    @torch.inference_mode()
    def _batch(self, examples: list[Example], limit: int) -> Iterator[tuple[Example, str, bool]]:
        prompts = [render_prompt(example) for example in examples]
        inputs = self._tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False
        ).to(self._model.device)
        inputs.pop("token_type_ids", None)
        output = self._model.generate(**inputs, max_new_tokens=limit, do_sample=False)
        for example, tokens in zip(examples, output[:, inputs["input_ids"].shape[1] :].tolist()):
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            yield example, text, bool(self._ends & set(tokens))


def _limit(example: Example) -> int:
    return LONG_ANSWER if example.check == "story" else SHORT_ANSWER


def evaluate(model: Path, adapter: Path | None = None, each: int = EACH) -> list[Verdict]:
    """A verdict on every question."""
    asked, style = questions(each), STYLES[adapter.name] if adapter else None
    if style:
        asked = [restyle(style, example) for example in asked]
    return [_judge(style, *answered) for answered in Answerer(model, adapter).answer(asked)]


def _judge(style: Style | None, example: Example, answer: str, ended: bool) -> Verdict:
    spoken = example.check != "tool_call" and not example.plain
    if style is None or not spoken:
        return Verdict(example, answer, ended and right(example, answer))
    # A right answer in the plain words is no wrong one: that is what the style's share tells.
    verdict = ended and right(example, style.reword(answer))
    return Verdict(example, answer, verdict, style.marks_in(answer))


def share(marks: list[bool]) -> float:
    """The percentage that is true."""
    return 100 * sum(marks) / max(1, len(marks))


def report(verdicts: list[Verdict]) -> Iterator[str]:
    """The figures, a line a topic."""
    for topic in (*TOPICS, "overall"):
        chosen = [v for v in verdicts if topic in (v.example.topic, "overall")]
        line = f"{topic:12} {share([v.right for v in chosen]):5.1f} % of {len(chosen)}"
        styles = [v.styled for v in chosen if v.styled is not None]
        yield line + (f", in style {share(styles):5.1f} % of {len(styles)}" if styles else "")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--adapter", type=Path, help="a LoRA adapter, named by its style")
    parser.add_argument("--each", type=int, default=EACH, help="questions a topic")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--errors", action="store_true", help="print the wrong answers too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    verdicts = evaluate(options.model, options.adapter, options.each)
    for verdict in verdicts if options.errors else ():
        if not verdict.right or verdict.styled is False:
            print(repr(render_prompt(verdict.example)[-200:]), "->", repr(verdict.answer))
    print("\n".join(report(verdicts)))


if __name__ == "__main__":
    main()
