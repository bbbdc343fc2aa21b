"""What a model that hears is told to do, and which windows are asked again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from django.http import QueryDict

from engine.contract.errors import InvalidRequest
from engine.contract.sampling_params import SamplingParams
from engine.multimodal.inputs import PreparedSound
from inference.api.audio import form as audio_form
from inference.api.audio.form import AudioForm
from inference.api.audio.segments import Segment, WindowText
from inference.api.audio.transcription import Transcription, WhisperTokens

TOKENS = WhisperTokens(
    start=100,
    end=99,
    transcribe=111,
    translate=110,
    previous=112,
    no_timestamps=114,
    no_speech=113,
    languages={"en": 101, "de": 102},
    suppressed=(7,),
)
FORM = AudioForm(data=b"", model=None, translates=False, language="de")


class Words:
    """A tokenizer whose tokens are words' lengths, but for one control token."""

    def encode(
        self, text: str, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        control = {"<|startoftranscript|>": TOKENS.start} if parse_special else {}
        return [control.get(word, len(word)) for word in text.split()]


def transcription(form: AudioForm, tokens: WhisperTokens = TOKENS) -> Any:
    """A transcription for a model with a context of 20 tokens."""
    served: Any = SimpleNamespace(
        name="whisper",
        tokenizer=Words(),
        info=SimpleNamespace(max_model_len=20, encoder_length=1500),
    )
    ctx: Any = None
    return Transcription(ctx, served, form, PreparedSound(1.0, []), tokens)


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({}, [100, 102, 111, 114]),
        ({"translates": True}, [100, 102, 110, 114]),
        ({"response_format": "srt"}, [100, 102, 111]),
        ({"prompt": "one three"}, [112, 3, 5, 100, 102, 111, 114]),
        ({"prompt": "a " * 50}, [112, *[1] * 9, 100, 102, 111, 114]),
        ({"prompt": "<|startoftranscript|> a"}, [112, 21, 1, 100, 102, 111, 114]),
    ],
)
def test_a_prompt_names_language_task_and_what_was_said_before(
    changes: dict[str, Any], prompt: list[int]
) -> None:
    assert transcription(replace(FORM, **changes))._prompt() == prompt


def test_a_model_of_english_is_told_neither_language_nor_task() -> None:
    tokens = replace(TOKENS, languages={})
    assert transcription(replace(FORM, language=""), tokens)._prompt() == [100, 114]
    for changes, param in (({"language": "de"}, "language"), ({"translates": True}, "model")):
        with pytest.raises(InvalidRequest) as refused:
            transcription(replace(FORM, **changes), tokens)
        assert refused.value.param == param


def test_a_language_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="language must be") as refused:
        transcription(replace(FORM, language="tlh"))
    assert refused.value.param == "language"


def window(text: str, avg_logprob: float, no_speech_prob: float) -> WindowText:
    """A window's text."""
    segments = [Segment(0.0, 1.0, text, [1])]
    return WindowText(0.0, 30.0, segments, 0.0, avg_logprob, no_speech_prob, [(1, avg_logprob)])


def test_windows_that_repeat_themselves_or_are_unlikely_are_asked_again() -> None:
    assert Transcription._is_plausible(window("plain words here", -0.4, 0.1))
    assert not Transcription._is_plausible(window("again and " * 40, -0.1, 0.1))
    assert not Transcription._is_plausible(window("mumbled", -1.2, 0.1))


def test_a_window_that_is_likely_no_speech_has_no_text() -> None:
    silent = window("Thank you.", -1.4, 0.9)
    assert Transcription._is_plausible(silent)  # no need to ask again
    assert Transcription._spoken(silent).text == ""
    assert Transcription._spoken(window("Thank you.", -0.3, 0.9)).text == "Thank you."


def test_a_top_p_of_0_is_refused_as_in_other_requests() -> None:
    form = audio_form._checked(QueryDict("top_p=0"), {"file"}, False)
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**form.sampling)
    assert refused.value.param == "top_p"


@pytest.mark.parametrize("name", ["file_id", "file_url"])
def test_a_file_that_json_names_by_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="must name the file") as refused:
        audio_form._read_json({name: ""}, translates=False)
    assert refused.value.param == "file_url"


def test_vllms_fields_of_sampling_reach_the_engine() -> None:
    query = "top_p=0.5&top_k=3&min_p=0.1&repetition_penalty=1.1&presence_penalty=-1"
    params = SamplingParams(**audio_form._checked(QueryDict(query), {"file"}, False).sampling)
    assert (params.top_p, params.top_k, params.min_p) == (0.5, 3, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, -1)
