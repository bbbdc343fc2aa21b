"""`/v1/moderations` by a classification model, with OpenAI's types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from openai.types import ModerationCreateResponse

from engine import LLM
from inference.api.pooling.views import moderation_result
from tests.engine.pooling.models import TEXTS
from tests.inference.conftest import Gateway
from tests.inference.pooling.conftest import Serve

URL = "/v1/moderations"


async def test_each_text_is_judged_by_the_models_labels(
    gateway: Gateway, serve: Serve, folders: Any
) -> None:
    expected = LLM(str(folders["classify"])).classify(TEXTS, use_tqdm=False)
    async with serve("classify"), serve("embed"):
        several = (await gateway.client.post(URL, {"model": "classify", "input": TEXTS})).json()
        for model in (None, "omni-moderation-latest"):  # whatever moderates here
            body = {"input": TEXTS[0]} | ({"model": model} if model else {})
            isolated_payload = (await gateway.client.post(URL, body)).json()
            assert (isolated_payload["model"], len(isolated_payload["results"])) == ("classify", 1)
        part = {"type": "text", "text": TEXTS[0]}
        parts = (await gateway.client.post(URL, {"model": "classify", "input": [part]})).json()
    answer = ModerationCreateResponse.model_validate(several | {"results": []})
    assert answer.model == "classify"
    for result, expected_output in zip(several["results"], expected, strict=True):
        scores = list(result["category_scores"].values())
        np.testing.assert_allclose(scores, expected_output.outputs.probs, atol=1e-6)
        assert result["flagged"] == (max(scores) >= 0.5)
        assert result["categories"].keys() == result["category_scores"].keys()
    assert (
        parts["results"][0]["category_scores"] == isolated_payload["results"][0]["category_scores"]
    )


@pytest.mark.parametrize(
    ("labels", "scores", "flagged"),
    [
        (["safe", "unsafe"], [0.9, 0.1], []),
        (["Safe", "unsafe"], [0.2, 0.8], ["unsafe"]),
        (["non-toxic", "toxic"], [0.4, 0.6], ["toxic"]),
        (["toxic", "obscene", "threat"], [0.7, 0.6, 0.1], ["toxic", "obscene"]),
        (["OK", "H", "V"], [1.0, 0.0, 0.0], []),
    ],
)
def test_labels_that_say_fine_are_no_categories(
    labels: list[str], scores: list[float], flagged: list[str]
) -> None:
    result = moderation_result(labels, scores)
    assert [name for name, is_flagged in result["categories"].items() if is_flagged] == flagged
    assert result["flagged"] is bool(flagged)
    assert labels[0] not in result["categories"] or labels[0] == "toxic"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "classify"}, "input"),
        ({"model": "classify", "input": ""}, "input"),
        ({"model": "classify", "input": []}, "input"),
        ({"model": "classify", "input": ["x", ""]}, "input"),
        ({"model": "classify", "input": ["x"] * 5000}, "input"),
        (
            {"model": "classify", "input": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "input[0].type",
        ),
        ({"model": "fake", "input": "x"}, "model"),
        ({"input": "x"}, "model"),
    ],
)
async def test_fault_02_what_is_wrong_is_named(
    served: Gateway, body: dict[str, Any], param: str
) -> None:
    reply = await served.client.post(URL, body)
    assert (reply.status, reply.error["param"]) == (400, param), reply.body
