"""A mixture of experts in one call, where the kernels have one."""

from __future__ import annotations

from collections.abc import Sequence

from engine.models.moe import GatedExpert, Router
from engine.models.norms import Step, steps_of
from engine.models.spec import DecoderSpec
from kernels import KernelSet, LinearLayer
from kernels.interface import ActivationSpec, CompiledExperts, ExpertLayers

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped")
"""Those that compiled layers know."""


def activation_spec(spec: DecoderSpec) -> ActivationSpec:
    """As the kernels take it."""
    return ActivationSpec(spec.activation, spec.activation_limit, spec.activation_alpha)


def compile_experts(
    ops: KernelSet,
    spec: DecoderSpec,
    router: Router,
    layers: Sequence[tuple[LinearLayer, LinearLayer]],
    shared: Step | None,
) -> CompiledExperts | None:
    """`layers` are gate over up, and down, of each expert. None: they must run one by one."""
    if not spec.gated or spec.activation not in ACTIVATIONS:
        return None
    gate = shared.gate if isinstance(shared, GatedExpert) else None
    expert = shared.expert if isinstance(shared, GatedExpert) else shared
    shared_up, shared_down = (None, None) if expert is None else steps_of(expert)[::2]
    return ops.compile_experts(
        ExpertLayers(
            router=router.linear,
            gate_up=[up for up, _ in layers],
            down=[down for _, down in layers],
            top_k=router.top_k,
            softmax_first=router.softmax_first,
            renormalize=router.renormalize,
            activation=activation_spec(spec),
            shared_gate_up=_linear(shared_up),
            shared_down=_linear(shared_down),
            shared_gate=gate,
        )
    )


def _linear(step: Step | None) -> LinearLayer | None:
    if step is not None and not isinstance(step, LinearLayer):
        raise TypeError(f"a shared expert is made of packed layers, not of {step!r}")
    return step
