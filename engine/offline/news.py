"""`Told`: what of one request has been handed over, for results that hold what is new."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.contract.outputs import CompletionOutput, RequestOutput


@dataclass(slots=True)
class _Mark:
    """How far one output was told."""

    tokens: int = 0
    chars: int = 0
    finished: bool = False


@dataclass(slots=True)
class Told:
    """How far each output was told, and whether the prompt's log probabilities were."""

    marks: dict[int, _Mark] = field(default_factory=dict)
    prompt: bool = False

    def news(self, result: RequestOutput) -> RequestOutput:
        """The outputs that have something new, with that alone; `cumulative_logprob` stays that of
        all tokens. The prompt's log probabilities come once.
        """
        outputs = [new for output in result.outputs if (new := self._new(output)) is not None]
        scores = None if self.prompt else result.prompt_logprobs
        self.prompt = self.prompt or scores is not None
        return replace(result, outputs=outputs, prompt_logprobs=scores)

    def _new(self, output: CompletionOutput) -> CompletionOutput | None:
        mark = self.marks.setdefault(output.index, _Mark())
        before = replace(mark)
        mark.tokens, mark.chars = len(output.token_ids), len(output.text)
        mark.finished = output.finished
        if mark == before:
            return None
        return replace(
            output,
            text=output.text[before.chars :],
            token_ids=output.token_ids[before.tokens :],
            logprobs=None if output.logprobs is None else output.logprobs[before.tokens :],
        )
