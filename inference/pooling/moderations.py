"""`POST /v1/moderations`: OpenAI's form for what a classification model says of texts."""

from __future__ import annotations

from typing import Any

from django.http.response import HttpResponseBase
from pydantic import BaseModel, ConfigDict

from catalog.access import access_models
from engine.contract.errors import InvalidRequest
from engine.contract.similarity import Vectors
from inference.engine_client import get_engine_client
from inference.errors import UnsupportedField
from inference.openai.serving import parse_beside
from inference.pooling.inputs import item_entries
from inference.pooling.run import begin
from inference.pooling.schemas import PoolingBody
from inference.settings import gateway_settings
from inference.web.views import GatewayRequest, GatewayView
from tenants.authentication import Caller

#: A label that is at least this likely is flagged.
THRESHOLD = 0.5
#: Labels that say that a text is fine, in small letters and without separators.
FINE = frozenset(
    {
        *("safe", "ok", "okay", "fine", "clean", "benign", "normal", "neutral", "none", "no"),
        *("nontoxic", "nottoxic", "nohate", "nonhate", "nothate", "nothatespeech", "sfw"),
        *("harmless", "unharmful", "notoffensive", "nonoffensive", "legit", "acceptable", "s"),
    }
)
#: OpenAI's own moderators: whoever asks for them means the one that is here.
OPENAIS = ("omni-moderation", "text-moderation")


class Part(BaseModel):
    """A part of one input. Only text is taken."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class ModerationRequest(PoolingBody):
    """The body: one text, several, or the parts of one."""

    input: str | list[str] | list[Part]

    def check_fields(self) -> None:
        """See `PoolingBody`."""
        limit = gateway_settings().max_prompts
        if not self.input or (len(self.input) > limit and not isinstance(self.input, str)):
            raise InvalidRequest(f"input must hold 1 to {limit} texts.", param="input")
        for place, part in enumerate(self.input):
            if isinstance(part, Part) and (part.type != "text" or part.text is None):
                raise UnsupportedField(
                    "Only parts of the type 'text' are supported.", param=f"input[{place}].type"
                )
        if not all(self.texts):
            raise InvalidRequest("input must not hold an empty text.", param="input")

    @property
    def texts(self) -> list[str]:
        """What is judged, each by itself."""
        if isinstance(self.input, str):
            return [self.input]
        texts = [part for part in self.input if isinstance(part, str)]
        parts = [part.text or "" for part in self.input if isinstance(part, Part)]
        return texts or ["\n".join(parts)]


class ModerationsView(GatewayView):
    """Whether texts are of a kind that a classifier finds."""

    generates = True

    async def post(self, request: GatewayRequest) -> HttpResponseBase:
        """`{"id", "model", "results": [{"flagged", "categories", "category_scores"}]}`."""
        body = await parse_beside(ModerationRequest, self.read_json(request))
        if body.model is None or body.model.startswith(OPENAIS):
            body.model = await only_classifier(request.caller)
        call = await begin(request, body, "moderations", "input", "classify")
        facts = call.served.info.pooling
        labels = facts.labels if facts is not None else []

        def make(results: list[Vectors]) -> dict[str, Any]:
            return {"results": [judged(labels, row.tolist()) for row in results]}

        entries = item_entries(call.served, [*body.texts], body.params("classify"))
        return await call.answer(await call.entries(entries), make)


async def only_classifier(caller: Caller) -> str:
    """The name of the only classification model of the caller's.

    Raises: `InvalidRequest` for none, or several.
    """
    client = get_engine_client()
    await client.start()
    found = [
        card.id
        for card in await access_models(caller)
        if (info := client.fleet.model(card.id)) is not None and "classify" in info.tasks
    ]
    if len(found) != 1:
        raise InvalidRequest(
            "There are several classification models: name one in model."
            if found
            else "There is no classification model that this key may use.",
            param="model",
        )
    return found[0]


def judged(labels: list[str], scores: list[float]) -> dict[str, Any]:
    """One text's result: its categories are the model's labels, but for those that say "fine"."""
    kinds = {
        label: score
        for label, score in zip(labels, scores, strict=True)
        if "".join(filter(str.isalnum, label.lower())) not in FINE
    }
    categories = {label: score >= THRESHOLD for label, score in kinds.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": kinds,
        "category_applied_input_types": {label: ["text"] for label in kinds},
    }
