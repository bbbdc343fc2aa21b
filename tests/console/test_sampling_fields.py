"""The form's ranges are the engine's."""

from __future__ import annotations

import math

import pytest

from console.views.playground import GROUPS, SamplingField
from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import SamplingParams

FIELDS = [field for group in GROUPS for field in group.fields]
NUMBERS = [field for field in FIELDS if field.kind != "strings"]


def typed(field: SamplingField, value: float) -> float | int:
    return int(value) if field.kind == "integer" else float(value)


def ends(field: SamplingField) -> tuple[float, float]:
    low = math.nextafter(field.low, math.inf) if field.low_open else field.low
    return low, field.high


@pytest.mark.parametrize("field", NUMBERS, ids=lambda f: f.name)
def test_the_engine_takes_both_ends_of_the_range(field: SamplingField) -> None:
    for value in ends(field):
        SamplingParams(**{field.name: typed(field, value)})


@pytest.mark.parametrize("field", NUMBERS, ids=lambda f: f.name)
def test_the_engine_refuses_what_is_just_outside(field: SamplingField) -> None:
    step = 1 if field.kind == "integer" else 1e-6
    if field.name == "seed":  # the engine takes negative ones, and more than a browser holds
        return
    outside = [field.low if field.low_open else field.low - step, field.high + step]
    for value in outside:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field.name: typed(field, value)})
        assert caught.value.param == field.name


@pytest.mark.parametrize("field", [f for f in NUMBERS if f.rest is not None], ids=lambda f: f.name)
def test_a_slider_rests_at_the_engines_default_and_stays_in_the_range(
    field: SamplingField,
) -> None:
    assert field.rest == getattr(SamplingParams(), field.name)
    for value in (field.slider_low, field.slider_high):
        SamplingParams(**{field.name: typed(field, value)})


def test_stop_strings_have_the_engines_limits() -> None:
    (field,) = [field for field in FIELDS if field.kind == "strings"]
    SamplingParams(stop=["x" * field.chars] * field.max_items)
    with pytest.raises(InvalidRequest):
        SamplingParams(stop=["x"] * (field.max_items + 1))
    with pytest.raises(InvalidRequest):
        SamplingParams(stop=["x" * (field.chars + 1)])
