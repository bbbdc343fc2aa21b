"""Source of a package with two models that the engine doesn't know."""

PACKAGE = '''
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models.decoder import NativeDecoder
from engine.models.registry import decoder_spec

IMPORTS = []
IMPORTS.append(__name__)


class ContraryDecoder(NativeDecoder):
    """Llama that chooses the least likely token."""

    @staticmethod
    def make_spec(config):
        return decoder_spec({**config, "architectures": ["LlamaForCausalLM"]})

    def logits(self, hidden):
        return -super().logits(hidden)


class MineForCausalLM(LlamaForCausalLM):
    """Llama by another name, for the bridge."""


class Incomplete:
    """Neither."""


def plug():
    from engine import ModelRegistry

    ModelRegistry.register_model("PluggedForCausalLM", "outside_pkg.model:MineForCausalLM")
'''
