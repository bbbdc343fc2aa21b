"""Trains the demo model that sees, a LLaVA of 1.2 million parameters.

    python -m demo.vision.train --out DIR [--steps N] [--minutes N]

A run that was cut off goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from random import Random
from string import ascii_uppercase

import torch
from torch import nn
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from demo import tokenizer as bpe
from demo.train import (
    TEMPERATURE,
    Optimizer,
    load_checkpoint,
    save_checkpoint,
    schedule,
    update,
)
from demo.vision.pictures import GENERAL, MAX_LETTERS, NO_PICTURE, Picture, stream

SEED = 5
IMAGE = "<image>"
SIDE, PATCH = 64, 8
VOCABULARY = 448
BATCH = 64
SAVE_EVERY = 25
#: In one batch of so many, conversations ask several questions: rows are as long as the longest.
FOLLOW_UP_EVERY = 8
#: One of this many rows has no image.
BLIND_EVERY = 24
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Frames of sentences are a few tokens; a letter of a word that is read is one."""
    lowered = (
        f"{question}\n{''.join(c for c in answer if not c.isupper() or c in 'TI')}"
        for picture in islice(stream(SEED), 2000)
        for question, answer in picture.questions
    )
    wrapped = bpe.wrap(bpe.train(lowered, VOCABULARY))
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>", IMAGE]})
    wrapped.image_token, wrapped.chat_template = IMAGE, TEMPLATE
    return wrapped


def make_processor(tokens: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Squeezes a picture into `SIDE` x `SIDE` pixels."""
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False)
    return LlavaProcessor(
        images,
        tokens,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def make_model(tokens: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """The untrained model."""
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        initializer_range=0.05,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=tokens.convert_tokens_to_ids(IMAGE),
            image_seq_length=(SIDE // PATCH) ** 2,
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
    )


def conversation(
    picture: Picture | None, rng: Random, *, follow_up: bool
) -> list[tuple[str, bool]]:
    """Stretches of a conversation about a picture, and which the model is to say."""
    if picture is None:
        turns = [(rng.choice((*GENERAL, "Hello", "Hi!", "Who are you?", "Help")), NO_PICTURE)]
    else:
        turns = rng.sample(picture.questions, len(picture.questions) if follow_up else 1)
    parts = []
    for index, (question, answer) in enumerate(turns):
        seen = IMAGE * (SIDE // PATCH) ** 2 if picture is not None and not index else ""
        if rng.random() < 0.25:
            question = question.lower().rstrip("?.")
        parts.append(
            (f"<|im_start|>user\n{seen}{question}<|im_end|>\n<|im_start|>assistant\n", False)
        )
        parts += [(f"{answer}<|im_end|>", True), ("\n", False)]
    return parts


def batches(processor: LlavaProcessor, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Conversations side by side, with the tokens to be learned as labels."""
    rng, pictures, tokens = Random(seed), stream(seed), processor.tokenizer
    for number in count(1):
        rows, images, letters, follow_up = [], [], [], number % FOLLOW_UP_EVERY == 0
        for index in range(BATCH):
            picture = None if index % BLIND_EVERY == 0 else next(pictures)
            if picture is not None:
                images.append(picture.image)
                letters += letters_of_patches(picture)
            ids: list[int] = []
            labels: list[int] = []
            for text, learned in conversation(picture, rng, follow_up=follow_up):
                part = tokens.encode(text, add_special_tokens=False)
                ids += part
                labels += part if learned else [-100] * len(part)
            rows.append((ids, labels))
        length = max(len(ids) for ids, _ in rows)
        pad = tokens.pad_token_id
        yield {
            "input_ids": torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([row + [-100] * (length - len(row)) for _, row in rows]),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows]
            ),
            "pixel_values": processor.image_processor(images, return_tensors="pt")["pixel_values"],
            "letters": torch.tensor(letters),
        }


class LetterTeacher(nn.Module):
    """Tells from what the decoder gets of each patch which letter it shows. Not exported.

    Letters take a fraction of the pictures that they take where answers alone are learned.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.letter = nn.Linear(size, len(ascii_uppercase))
        self.place = nn.Linear(size, MAX_LETTERS)

    def forward(self, features: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
        """The mean loss of the letter and its place. `features`: (patches, size), `letters`: as of
        `letters_of_patches`."""
        shown = letters[:, 0] >= 0
        features, letters = features[shown], letters[shown]
        losses = (
            nn.functional.cross_entropy(head(features).float(), letters[:, column])
            for column, head in enumerate((self.letter, self.place))
        )
        return sum(losses)


def letters_of_patches(picture: Picture) -> list[tuple[int, int]]:
    """The letter that the middle of each patch shows, from 0, and its place in the word, from 0; -1
    twice for none.
    """
    labels = []
    for index in range((SIDE // PATCH) ** 2):
        y, x = ((number + 0.5) * PATCH / SIDE for number in divmod(index, SIDE // PATCH))
        label = (-1, -1)
        for place, (letter, (left, top, right, bottom)) in enumerate(picture.letters):
            if left <= x < right and top <= y < bottom:
                label = ascii_uppercase.index(letter), place
        labels.append(label)
    return labels


def export(out: Path, model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
    """The model as it ships, in bfloat16. The model in training is left as it is."""
    shipped = LlavaForConditionalGeneration(model.config).to(torch.bfloat16)
    weights = model.state_dict()
    shipped.load_state_dict({name: weights[name] for name in shipped.state_dict()})
    tokens = processor.tokenizer
    shipped.generation_config.update(
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        do_sample=True,
        temperature=TEMPERATURE,
    )
    shipped.save_pretrained(out)
    processor.save_pretrained(out)


def train(out: Path, steps: int, minutes: float) -> None:
    """The whole run."""
    out.mkdir(parents=True, exist_ok=True)
    processor = make_processor(make_tokenizer())
    torch.manual_seed(SEED)
    model = make_model(processor.tokenizer)
    model.set_attn_implementation("eager")  # learns in half of the fused kernel's time
    model.letters = LetterTeacher(model.config.text_config.hidden_size)
    optimizer = Optimizer(model)
    first = load_checkpoint(out, model, optimizer)
    print(f"{model.num_parameters():,} parameters, from step {first}", flush=True)
    started, losses = time.monotonic(), []
    for step, batch in zip(range(first, steps), batches(processor, SEED + first)):
        letters = batch.pop("letters")
        with torch.autocast("cpu", torch.bfloat16):
            answers = model(**batch, use_cache=False)
            features = answers.image_hidden_states.flatten(0, -2)
            loss = answers.loss + model.letters(features, letters)
        update(model, optimizer, loss, schedule(step, steps))
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            seconds, mean = time.monotonic() - started, sum(losses[-50:]) / 50
            print(f"step {step + 1}/{steps} loss {mean:.4f} {seconds:.0f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            save_checkpoint(out, model, optimizer, step + 1)
            export(out, model, processor)
        if time.monotonic() - started > minutes * 60:
            break


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, options.steps, options.minutes)


if __name__ == "__main__":
    main()
