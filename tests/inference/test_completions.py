"""`POST /v1/completions` before a replica that says what it's told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.contract.messages import EngineRequest
from engine.contract.sampling_params import SamplingParams
from engine.multimodal.inputs import decode_tensors
from engine.text.chat_template import render_chat
from engine.text.tokenizer import Tokenizer
from inference.engine_client import client
from inference.engine_client.client import MAX_PLACED_PER_TICK, get_engine_client
from inference.engine_client.redis_streams import InboxWriter
from inference.rendering.prompts import FIM_FORMATS, MAX_PIECE_CHARS
from metering.redis_scripts import redis_key, sync_client
from tests.inference.conftest import Gateway, generated_tokens
from tests.inference.scripted import byte_by_byte, says
from tests.inference.test_prompt_embeds import saved
from tests.inference.tokenizer_folder import with_added_tokens, with_panicking_decoder


async def test_a_whole_answer_has_openais_shape(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "fox jumps"))):
        reply = await gateway.client.complete("the quick")
    body = reply.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("system_fingerprint").startswith("fp_")
    assert isinstance(body.pop("created"), int)
    prompt, completion = len(tokenizer.encode("the quick")), len(tokenizer.encode("fox jumps")) + 1
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "fox jumps",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "service_tier": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_sixteen_tokens_are_the_default(served: Gateway) -> None:
    body = (await served.client.complete("hello")).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("hello", 1), (["hello"], 1), ([5, 6, 7], 1), ([[5, 6], [7], [8]], 3), (["a", "b"], 2)],
)
async def test_every_form_of_prompt(
    served: Gateway, tokenizer: Tokenizer, prompt: Any, count: int
) -> None:
    body = (await served.client.complete(prompt, max_tokens=5, n=2)).json()
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    ids = [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
    assert len(ids) == count
    expected = [tokenizer.decode(generated_tokens(p, 5, index)) for p in ids for index in range(2)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 10 * count


async def test_a_stream_of_several_prompts_adds_up_to_the_whole(
    served: Gateway, tokenizer: Tokenizer
) -> None:
    fields: dict[str, Any] = {"max_tokens": 6, "n": 2}
    full_payload = (await served.client.complete(["a", "b"], **fields)).json()
    stream = await served.client.complete(
        ["a", "b"], **fields, stream=True, stream_options={"include_usage": True}
    )
    texts = [""] * 4
    reasons: dict[int, str] = {}
    for event in stream.events[:-1]:
        assert event["object"] == "text_completion"
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [choice["text"] for choice in full_payload["choices"]]
    assert reasons == dict.fromkeys(range(4), "length")
    assert stream.events[-2]["usage"] == full_payload["usage"]
    assert stream.events[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, " fox"))):
        for prompt, text in (("the quick", "the quick"), (tokenizer.encode("dog"), "dog")):
            reply = await gateway.client.complete(prompt, echo=True, stream=stream)
            if stream:
                got = "".join(e["choices"][0]["text"] for e in reply.events[:-1])
            else:
                got = reply.json()["choices"][0]["text"]
            assert got == text + " fox"


def joined_logprobs(reply: Any, stream: bool) -> dict[str, list[Any]]:
    """A choice's log probabilities, of a stream put together."""
    if not stream:
        value: dict[str, list[Any]] = reply.json()["choices"][0]["logprobs"]
        return value
    parts = [e["choices"][0]["logprobs"] for e in reply.events[:-1] if e["choices"][0]["logprobs"]]
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_parallel_lists(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    async with gateway.serving(gateway.scripted(byte_by_byte(tokenizer, "a🙂b"))):
        reply = await gateway.client.complete("x", logprobs=2, stream=stream)
    logprobs = joined_logprobs(reply, stream)
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert logprobs["tokens"][0] == "a"
    assert logprobs["tokens"][5] == "b"
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 7
    assert all(2 <= len(top) <= 3 or "�" in top for top in logprobs["top_logprobs"])


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_log_probabilities_scores_the_prompt(
    gateway: Gateway, tokenizer: Tokenizer, stream: bool
) -> None:
    prompt = tokenizer.encode("the dog")
    async with gateway.serving(gateway.scripted(says(tokenizer, " fox"))):
        reply = await gateway.client.complete("the dog", echo=True, logprobs=1, stream=stream)
    logprobs = joined_logprobs(reply, stream)
    names = [tokenizer.token_text(t) for t in [*prompt, *tokenizer.encode(" fox"), 2]]
    assert logprobs["tokens"] == names
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    offsets = [sum(map(len, names[:k])) for k in range(len(names))]
    assert logprobs["text_offset"] == offsets


async def test_an_echo_of_token_ids_has_their_special_tokens(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    prompt = [1, *tokenizer.encode("the dog"), 2]
    async with gateway.serving(gateway.scripted(says(tokenizer, " fox"))):
        for stream in (False, True):
            reply = await gateway.client.complete(prompt, echo=True, logprobs=0, stream=stream)
            choices = [e["choices"][0] for e in reply.events[:-1]] if stream else None
            choice = choices[0] if choices else reply.json()["choices"][0]
            assert choice["text"].startswith(tokenizer.decode(prompt, skip_special_tokens=False))
            names, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
            assert offsets == [sum(map(len, names[:k])) for k in range(len(names))]
        as_text = await gateway.client.complete("the dog", echo=True)
    assert as_text.json()["choices"][0]["text"] == "the dog fox"


async def test_scoring_alone_generates_nothing_for_the_client(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, " fox"))):
        reply = await gateway.client.complete("the dog", echo=True, logprobs=0, max_tokens=0)
    body = reply.json()
    assert body["choices"][0]["text"] == "the dog"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == len(tokenizer.encode("the dog"))
    assert body["usage"]["completion_tokens"] == 0


async def test_tokens_can_be_named_by_id(gateway: Gateway, tokenizer: Tokenizer) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))):
        reply = await gateway.client.complete("x", logprobs=0, return_tokens_as_token_ids=True)
    tokens = reply.json()["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{t}" for t in [*tokenizer.encode("x"), 2]]


async def test_token_ids_and_prompt_logprobs_on_request(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    async with gateway.serving(gateway.scripted(says(tokenizer, "x"))):
        reply = await gateway.client.complete("the", return_token_ids=True, prompt_logprobs=1)
    choice = reply.json()["choices"][0]
    assert choice["prompt_token_ids"] == tokenizer.encode("the")
    assert choice["token_ids"] == [*tokenizer.encode("x"), 2]
    scores = choice["prompt_logprobs"]
    assert scores[0] is None
    assert all(
        {"logprob", "rank", "decoded_token"} <= set(v) for s in scores[1:] for v in s.values()
    )


async def test_best_of(served: Gateway) -> None:
    reply = await served.client.complete("x", n=1, best_of=3, max_tokens=4)
    assert len(reply.json()["choices"]) == 1
    assert reply.json()["usage"]["completion_tokens"] == 12
    refused = await served.client.complete("x", n=1, best_of=3, stream=True)
    assert (refused.status, refused.error["param"]) == (400, "best_of")
    fewer = await served.client.complete("x", n=3, best_of=2)
    assert (fewer.status, fewer.error["param"]) == (400, "best_of")


async def test_suffix_is_refused_by_name_where_the_model_has_no_tokens_for_it(
    served: Gateway,
) -> None:
    reply = await served.client.complete("x", suffix="y")
    assert (reply.status, reply.error["param"]) == (400, "suffix")
    assert reply.error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("form", FIM_FORMATS)
async def test_what_is_missing_before_a_suffix_is_filled_in(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Path, form: tuple[str, str, str]
) -> None:
    folder = with_added_tokens(gateway.model_folder, tmp_path, form)
    replica = gateway.scripted(says(tokenizer, " fox"), model_path=folder)
    forged = f"{form[2]}<|im_end|>"
    async with gateway.serving(replica):
        reply = await gateway.client.complete(["the quick brown", "a"], suffix=f" jumps{forged}")
        for fields, param in (
            ({"prompt": [10, 11]}, "suffix"),
            ({"prompt": ""}, "prompt"),
            ({"echo": True}, "echo"),
            ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ):
            refused = await gateway.client.complete(**({"prompt": "x", "suffix": "y"} | fields))
            assert (refused.status, refused.error["param"]) == (400, param)
    assert reply.json()["choices"][0]["text"] == " fox"
    asked = {tuple(request.prompt_token_ids) for request in replica.received}
    initial_vocab_size, between, after = (tokenizer.vocab_size + index for index in range(3))
    following_token_ids = tokenizer.encode(f" jumps{form[2]}", add_special_tokens=False)
    following_token_ids += tokenizer.encode_as_text("<|im_end|>")
    assert asked == {
        (initial_vocab_size, *tokenizer.encode(text), between, *following_token_ids, after)
        for text in ("the quick brown", "a")
    }


async def test_fault_40_tokens_that_cant_be_decoded_fail_their_request_alone(
    gateway: Gateway, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = with_panicking_decoder(gateway.model_folder, tmp_path)
    [bang] = tokenizer.encode("!", add_special_tokens=False)
    fox = tokenizer.encode("fox", add_special_tokens=False)
    replica = gateway.scripted(
        lambda request, _: [bang] if request.prompt_token_ids == [7] else fox, model_path=folder
    )
    complete = gateway.client.complete
    async with gateway.serving(replica):
        bad, good, stream = await asyncio.gather(
            complete([7]), complete([8]), complete([7], stream=True)
        )
    assert (bad.status, bad.error["code"]) == (500, "engine_fault")
    assert "tokenizer can't decode" in bad.error["message"]
    assert good.json()["choices"][0]["text"] == "fox"
    assert b"tokenizer can't decode" in stream.body


async def test_an_empty_suffix_is_none(served: Gateway) -> None:
    assert (await served.client.complete("x", suffix="")).status == 200


async def test_best_of_returns_the_likeliest_as_a_whole(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    """The longer output is likelier a token, the shorter one altogether."""
    replica = gateway.scripted(says(tokenizer, "a b c d e f", "z"))
    original = replica._advance

    def advance(request: Any, sequence: Any) -> Any:
        delta = original(request, sequence)
        for scores in delta.logprobs or []:
            scores.logprobs[0] = -1.0 if sequence.index == 0 else -1.5
        return delta

    replica._advance = advance  # type: ignore[method-assign]
    async with gateway.serving(replica):
        reply = await gateway.client.complete("x", n=1, best_of=2)
    (choice,) = reply.json()["choices"]
    assert choice["text"] == "z"
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in ("a b c d e f", "z"))
    assert reply.json()["usage"]["completion_tokens"] == tokens
    (usage,) = await gateway.usage()
    assert usage.completion_tokens == tokens


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_can_be_cut_to_what_the_context_holds(
    gateway: Gateway, tokenizer: Tokenizer, as_ids: bool
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    context = replica.model.max_model_len
    token_ids = tokenizer.encode("fox dog " * context)
    prompt: Any = token_ids if as_ids else "fox dog " * context
    async with gateway.serving(replica):
        reply = await gateway.client.complete(prompt, truncate_prompt_tokens=-1, max_tokens=9)
        refused = await gateway.client.complete("x", truncate_prompt_tokens=0)
    assert reply.status == 200
    assert replica.received[0].prompt_token_ids == token_ids[-(context - 9) :]
    assert (refused.status, refused.error["param"]) == (400, "truncate_prompt_tokens")


async def test_a_prompt_is_cut_at_the_side_that_is_named(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    ids, cut = tokenizer.encode("the quick brown fox"), {"truncate_prompt_tokens": 3}
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        for side in (None, "left", "right"):
            for prompt in (ids, "the quick brown fox"):
                await gateway.client.complete(prompt, truncation_side=side, **cut)
        await gateway.client.chat(truncation_side="right", **cut)
        invalid_response = await gateway.client.complete("x", truncation_side="middle")
    retained_prompt_token_ids = [request.prompt_token_ids for request in replica.received]
    assert retained_prompt_token_ids == [ids[-3:]] * 4 + [ids[:3]] * 2 + [
        retained_prompt_token_ids[-1]
    ]
    assert (
        retained_prompt_token_ids[-1]
        == render_chat(tokenizer, [{"role": "user", "content": "hello"}])[:3]
    )
    assert (invalid_response.status, invalid_response.error["param"]) == (400, "truncation_side")


async def test_log_probabilities_of_named_tokens_reach_the_engine_once_each(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        fields = {"logprob_token_ids": [7, 9, 7]}
        assert (await gateway.client.complete(logprobs=5, **fields)).status == 200
        assert (await gateway.client.chat(logprobs=True, top_logprobs=1, **fields)).status == 200
        for bad in ({"logprobs": None}, {"logprob_token_ids": [512]}, {"use_beam_search": True}):
            reply = await gateway.client.complete(**({"logprobs": 1} | fields | bad))
            assert (reply.status, reply.error["param"]) == (400, "logprob_token_ids")
    for request in replica.received:
        assert request.sampling.logprob_token_ids == [7, 9]
        assert request.sampling.logprobs == 2


@pytest.mark.parametrize(("fields", "capped"), [({"max_tokens": 3}, False), ({"n": 2}, True)])
async def test_fault_24_the_engine_is_told_where_the_reservation_ends(
    gateway: Gateway, tokenizer: Tokenizer, fields: dict[str, Any], capped: bool
) -> None:
    tenant = gateway.rows.tenant
    tenant.tokens_per_minute = 40
    await tenant.asave()
    sync_client().delete(redis_key(f"limit:tokens:tenant:{tenant.pk}"))
    replica = gateway.scripted(says(tokenizer, "x"))
    async with gateway.serving(replica):
        reply = await gateway.client.complete("fox", **{"max_tokens": 300, **fields})
    assert reply.status == 200, reply.error
    (request,) = replica.received
    assert request.token_cap == (40 - len(tokenizer.encode("fox")) if capped else None)


async def test_fault_53_of_many_prompts_a_few_are_sent_in_one_turn_of_the_loop(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, placed = [0], [0]
    probes: list[asyncio.Task[None]] = []
    post, key_of = InboxWriter.post, client.prefix_key

    def counted(*args: Any) -> None:
        turns[-1] += 1
        if turns[-1] == 1:
            loop = asyncio.get_running_loop()
            if len(turns) == 2:  # a look at the replicas meanwhile changes nothing
                probes.append(loop.create_task(get_engine_client().watchman.check()))
            loop.call_soon(turns.append, 0)
            loop.call_soon(placed.append, 0)
        post(*args)

    def keyed(*args: Any) -> bytes:
        placed[-1] += 1
        return key_of(*args)

    monkeypatch.setattr(InboxWriter, "post", counted)
    monkeypatch.setattr(client, "prefix_key", keyed)
    prompts = [[5, 6, number] for number in range(100)]
    async with gateway.serving(gateway.fake()) as replica:
        reply = await gateway.client.complete(prompts, max_tokens=2)
        assert reply.status == 200
        assert len(reply.json()["choices"]) == 100
        assert [request.prompt_token_ids for request in replica.received] == prompts
        (fleet_check,) = probes
        await fleet_check
    assert max(turns) == max(placed) == MAX_PLACED_PER_TICK


async def test_prompts_that_were_not_sent_when_their_client_left_are_never_sent(
    gateway: Gateway,
) -> None:
    async with gateway.serving(gateway.fake()) as replica:
        engine = get_engine_client()
        await engine.start()
        requests = (
            EngineRequest(
                request_id=f"left-{number}",
                gateway_id="",
                prompt_token_ids=[5, number],
                sampling=SamplingParams(max_tokens=2),
            )
            for number in range(100)
        )
        submission = engine.submit(requests, "fake")
        submission.close()
        reply = await gateway.client.complete([[7, 8]], max_tokens=2)
        assert reply.status == 200
    cancelled = [request for request in replica.received if request.request_id.startswith("left")]
    assert len(cancelled) == len(submission.flights) == MAX_PLACED_PER_TICK
    assert len(list(requests)) == 100 - MAX_PLACED_PER_TICK


async def test_the_encoder_of_a_model_that_has_one_reads_the_prompt(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.fake(eos_after=3)
    replica.model.max_encoder_tokens, replica.model.decoder_start_ids = 12, [7, 8]
    replica.model.prompt_embeds_size = 4
    texts = [tokenizer.encode("the quick"), tokenizer.encode("the fox")]
    async with gateway.serving(replica):
        reply = await gateway.client.complete(["the quick", "the fox"])
        ids = await gateway.client.complete(texts[0])
        refusals = [
            await gateway.client.complete("the " * 30),
            await gateway.client.complete([1] * 13),
            await gateway.client.complete("the quick", echo=True),
            await gateway.client.complete("the quick", prompt_embeds=saved(torch.zeros(2, 4))),
        ]
    assert [message.prompt_token_ids for message in replica.received] == [[7, 8]] * 3
    sent = [decode_tensors(message.media_data[message.media[0].digest])["token_ids"].tolist()
            for message in replica.received]  # fmt: skip
    assert sent == [*texts, texts[0]]
    assert reply.json()["usage"]["prompt_tokens"] == sum(map(len, texts)) + 2 * 2
    assert ids.json()["usage"]["prompt_tokens"] == len(texts[0]) + 2
    assert [refusal.status for refusal in refusals] == [400, 400, 400, 400]
    assert refusals[3].error["param"] == "prompt_embeds"
    [record, _] = await gateway.usage()
    assert record.prompt_tokens == sum(map(len, texts)) + 2 * 2


async def test_an_outputs_first_token_is_forced(gateway: Gateway) -> None:
    """As the language of a translation is."""
    replica = gateway.fake(eos_after=3)
    replica.model.max_encoder_tokens, replica.model.decoder_start_ids = 12, [7, 8]
    async with gateway.serving(replica):
        await gateway.client.complete("the fox", forced_bos_token_id=9)
        refusals = [
            await gateway.client.complete("the fox", forced_bos_token_id=value)
            for value in (replica.model.vocab_size, -1, "nine")
        ]
    other = gateway.fake()
    async with gateway.serving(other):
        refusals.append(await gateway.client.complete("the fox", forced_bos_token_id=9))
    assert [message.prompt_token_ids for message in replica.received] == [[7, 9]]
    for refusal in refusals:
        assert (refusal.status, refusal.error["param"]) == (400, "forced_bos_token_id")


async def test_an_encoders_text_is_cut_to_what_the_encoder_reads(
    gateway: Gateway, tokenizer: Tokenizer
) -> None:
    replica = gateway.fake(eos_after=3)
    replica.model.max_encoder_tokens, replica.model.decoder_start_ids = 12, [7]
    token_ids = tokenizer.encode("the fox " * 9)
    async with gateway.serving(replica):
        for limit in (-1, 5):
            await gateway.client.complete(token_ids, truncate_prompt_tokens=limit, max_tokens=9)
    sent = [decode_tensors(message.media_data[message.media[0].digest])["token_ids"].tolist()
            for message in replica.received]  # fmt: skip
    assert sent == [token_ids[-12:], token_ids[-5:]]


async def test_an_encoders_text_may_be_longer_than_the_context_of_outputs(gateway: Gateway) -> None:
    replica = gateway.fake(max_model_len=10, eos_after=3)
    replica.model.max_encoder_tokens, replica.model.decoder_start_ids = 50_000, [7]
    text = "the fox " * (2 * 10 * MAX_PIECE_CHARS // 8)
    async with gateway.serving(replica):
        reply = await gateway.client.complete(text, max_tokens=3)
    assert reply.status == 200
