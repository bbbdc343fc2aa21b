"""Tiny random checkpoints and an adapter, made once."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from engine.contract.lora import CONFIG_FILE, WEIGHTS_FILE, AdapterRef, adapter_digest
from tests.engine.models import VOCAB, make_model, make_tokenizer
from tests.engine.multimodal.models import llava, qwen2_vl
from tests.engine.speech.models import make_whisper
from tests.features.heads import trained_head
from tests.survey.recipes import RECIPES
from tests.survey.tiny import make_checkpoint

RANK, ALPHA = 8, 12
#: By what sees: the prefix of its text part's weights, and what that part's config.json says of it.
_TEXT_PARTS: dict[str, tuple[str, dict[str, object]]] = {
    "llava": ("language_model.", {"architectures": ["LlamaForCausalLM"]}),
    "qwen2-vl": ("", {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
}
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


class Checkpoints:
    """Folders by what a model is: "llama", "qwen2-window" (every second layer has a window),
    "llava" (it sees), "qwen2-vl" (it sees videos), "whisper" (it hears), "mbart" (its encoder reads
    texts), "lfm2" (every second one keeps a state) or "recurrent_gemma" (others have a window).

    `adapter` gives one that changes what is said, `merged` the model that has it inside, `draft`
    nearly the model itself: mostly right, and `head` an EAGLE head that learnt some texts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.unquantized = functools.cache(self._make_unquantized)
        self.adapter = functools.cache(self._adapter)
        self.merged = functools.cache(self._merged)
        self.draft = functools.cache(self._draft)
        self.head = functools.cache(self._head)

    def _make_unquantized(self, kind: str) -> Path:
        folder = self._folder / kind
        if kind in ("lfm2", "recurrent_gemma"):
            make_checkpoint({**RECIPES[kind], "intermediate_size": 512}, folder)
            make_tokenizer().save_pretrained(folder)
            return folder
        if kind == "llava":
            llava(folder)
            return folder
        if kind == "qwen2-vl":
            qwen2_vl(folder)
            return folder
        if kind == "whisper":
            make_whisper(folder, vocab_size=VOCAB, max_target_positions=256)
            make_tokenizer().save_pretrained(folder)
            return folder
        if kind == "mbart":
            return _make_mbart(folder)
        return make_model(kind, folder, num_hidden_layers=2)

    def _text_part(self, kind: str) -> Path:
        """The model without its eyes."""
        full = self.unquantized(kind)
        if kind not in _TEXT_PARTS:
            return full
        prefix, text_model = _TEXT_PARTS[kind]
        folder = self._folder / f"{kind}-text"
        folder.mkdir()
        config = json.loads((full / "config.json").read_text())["text_config"]
        (folder / "config.json").write_text(json.dumps(config | text_model))
        weights = {
            name.removeprefix(prefix): tensor
            for name, tensor in load_file(full / "model.safetensors").items()
            if name.startswith(prefix) and not name.startswith("visual.")
        }
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    def _adapter(self, kind: str) -> AdapterRef:
        folder = self._folder / f"{kind}-adapter"
        folder.mkdir()
        generator = torch.Generator().manual_seed(4)
        tensors = {}
        for name, weight in load_file(self.unquantized(kind) / "model.safetensors").items():
            if _is_target(name):
                rows, columns = weight.shape
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                down, up = (RANK, columns), (rows, RANK)
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(down, generator=generator) * 0.15
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(up, generator=generator) * 0.15
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*TARGETS]}
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        save_file(tensors, folder / WEIGHTS_FILE)
        return AdapterRef(digest=adapter_digest(folder), name="a", path=str(folder))

    def _draft(self, kind: str) -> Path:
        folder = self._folder / f"{kind}-draft"
        shutil.copytree(self.unquantized(kind), folder)
        generator = torch.Generator().manual_seed(1)
        weights = {
            name: tensor + 0.001 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    def _head(self, kind: str, texts_of: Callable[[str], list[list[int]]]) -> Path:
        return trained_head(self._folder / f"{kind}-head", self._text_part(kind), texts_of(kind))

    def _merged(self, kind: str) -> Path:
        folder = self._folder / f"{kind}-merged"
        shutil.copytree(self.unquantized(kind), folder)
        delta = load_file(Path(self.adapter(kind).path) / WEIGHTS_FILE)
        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if _is_target(name):
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                up, down = delta[f"{prefix}.lora_B.weight"], delta[f"{prefix}.lora_A.weight"]
                weights[name] = weights[name] + (ALPHA / RANK) * up @ down
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder


def _make_mbart(folder: Path) -> Path:
    torch.manual_seed(0)
    sides = {
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 96}.items()
    }
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 2)
    config = tf.MBartConfig(
        vocab_size=VOCAB,
        d_model=64,
        max_position_embeddings=256,
        init_std=0.3,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **special,
        **sides,
    )
    tf.MBartForConditionalGeneration(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def _is_target(name: str) -> bool:
    module, _, kind = name.rpartition(".")
    return (
        kind == "weight"
        and module.rpartition(".")[2] in TARGETS
        and "vision_tower" not in module
        and "encoder" not in module
    )
