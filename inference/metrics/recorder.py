"""`Recorder`: this process's measurements since they were last drained."""

from __future__ import annotations

import json
from bisect import bisect_left
from typing import TYPE_CHECKING

from history.buckets import FIRST_TOKEN, GAP, LAST_BUCKET, bucket_index
from history.buckets import Series as TrafficSeries
from inference.metrics.definitions import FAMILIES, NONE

if TYPE_CHECKING:
    from engine.contract.errors import QuireError
    from inference.request.job import Job, Usage


#: Maximum number of series between two writes; further ones are counted together by model.
MAX_SERIES = 1000
_FIRST = [f"{FIRST_TOKEN}{index}" for index in range(LAST_BUCKET + 1)]
_GAPS = [f"{GAP}{index}" for index in range(LAST_BUCKET + 1)]


class TrafficCounters:
    """Plain numbers, updated only on the event loop."""

    def __init__(self) -> None:
        self._counts: dict[tuple[TrafficSeries, str], int] = {}
        self._series: set[TrafficSeries] = set()

    def first_token(self, job: Job, seconds: float) -> None:
        """A request's first token arrived `seconds` after the request."""
        self._add(job, _FIRST[bucket_index(seconds)], 1)

    def gap(self, job: Job, seconds: float, num_tokens: int) -> None:
        """Record `num_tokens` tokens of an output and the seconds since the previous ones."""
        series = _series_of(job)
        self._count(series, _GAPS[bucket_index(seconds / num_tokens)], num_tokens)
        self._count(series, "completion_tokens", num_tokens)

    def tokens(self, job: Job, num_tokens: int) -> None:
        """Record the first tokens of an answer."""
        self._add(job, "completion_tokens", num_tokens)

    def record_request_end(self, job: Job, usage: Usage, reason: str) -> None:
        """A request has ended. The tokens of its answer were counted as they arrived."""
        self._add(job, "requests", 1)
        if reason == "error":
            self._add(job, "errors", 1)
        self._add(job, "prompt_tokens", usage.prompt_tokens)
        self._add(job, "cached_tokens", usage.cached_tokens)

    def refused(self, job: Job) -> None:
        """A request was rejected by limits or budgets."""
        self._add(job, "refused", 1)

    def drain(self) -> dict[tuple[TrafficSeries, str], int]:
        """Remove and return all counts."""
        counts, self._counts, self._series = self._counts, {}, set()
        return counts

    def restore(self, counts: dict[tuple[TrafficSeries, str], int]) -> None:
        """Restore counts that could not be written."""
        for (series, what), count in counts.items():
            self._count(series, what, count)

    def _add(self, job: Job, what: str, count: int) -> None:
        self._count(_series_of(job), what, count)

    def _count(self, series: TrafficSeries, what: str, count: int) -> None:
        if not count:
            return
        if series not in self._series:
            if len(self._series) >= MAX_SERIES:
                series = (0, series[1], "")
            self._series.add(series)
        self._counts[series, what] = self._counts.get((series, what), 0) + count


def _series_of(job: Job) -> TrafficSeries:
    served = job.model
    adapter = served.use.name if served.use is not None else ""
    return job.caller.tenant_id, served.base, adapter


history = TrafficCounters()


Series = tuple[str, tuple[str, ...]]
#: Time between tokens, counted once per token; also published under its older name.
_GAP_BUCKETS = "vllm:inter_token_latency_seconds"
_OLDER_NAMES = {_GAP_BUCKETS: "vllm:time_per_output_token_seconds"}
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class _Distribution:
    """Counts by bucket (not cumulative; the last is +Inf) and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


def field_of(name: str, labels: tuple[str, ...], part: str) -> str:
    """Field of the Redis hash: `part` is a bucket's number, "sum", or "" for a counter."""
    return json.dumps([name, *labels, part])


def split_field(field: str) -> tuple[str, tuple[str, ...], str]:
    """Name, label values and part: the arguments of `field_of`."""
    name, *labels, part = json.loads(field)
    return name, tuple(labels), part


class Recorder:
    """Plain numbers, updated only on the event loop: an observation costs about a microsecond."""

    def __init__(self) -> None:
        self._distributions: dict[Series, _Distribution] = {}
        self._counters: dict[Series, int] = {}

    def observe(self, name: str, labels: tuple[str, ...], value: float, times: int = 1) -> None:
        """Add `times` observations of `value` to a histogram or a summary of `FAMILIES`."""
        series = (name, labels)
        distribution = self._distributions.get(series)
        if distribution is None:
            distribution = self._distributions[series] = _Distribution(FAMILIES[name].buckets)
        distribution.observe(value, times)

    def count(self, name: str, labels: tuple[str, ...], amount: int = 1) -> None:
        """Add to a counter of `FAMILIES`."""
        series = (name, labels)
        self._counters[series] = self._counters.get(series, 0) + amount

    def token_gap(self, job: Job, engine: str, seconds: float, num_tokens: int) -> None:
        """Record `num_tokens` tokens of an output and the seconds since the previous ones."""
        history.gap(job, seconds, num_tokens)
        self.observe(_GAP_BUCKETS, (job.model.base, engine), seconds / num_tokens, num_tokens)

    def first_token(self, job: Job, engine: str, seconds: float) -> None:
        """A request's first token has arrived."""
        model = job.model.base
        history.first_token(job, seconds)
        self.observe("vllm:time_to_first_token_seconds", (model, engine), seconds)
        tenant = (job.caller.tenant, model)
        self.observe("quire:tenant_time_to_first_token_seconds", tenant, seconds)

    def record_request_end(
        self,
        job: Job,
        usage: Usage,
        engine: str,
        reason: str,
        *,
        finished: bool,
        refused: bool,
        duration_s: float,
        decode_s: float | None,
        longest: int,
    ) -> None:
        """Record all that is known of a request at its end.

        `refused`: it failed through a fault of the client. `decode_s`: from its first token to its
        end, None without tokens; `longest`: number of tokens of its longest output.
        """
        model, params = job.model.base, job.sampling
        labels = (model, engine)
        counter = "vllm:request_success" if finished else "vllm:request_failure"
        # Alerts are based on "error", which must not include clients' mistakes.
        self.count(counter, (*labels, "refused" if refused else reason))
        self.observe("vllm:e2e_request_latency_seconds", labels, duration_s)
        self.observe("vllm:request_prompt_tokens", labels, usage.prompt_tokens)
        self.observe("vllm:request_generation_tokens", labels, usage.completion_tokens)
        self.observe("vllm:request_max_num_generation_tokens", labels, longest)
        self.observe("vllm:request_params_n", labels, params.n)
        self.observe("vllm:request_params_best_of", labels, params.num_sequences)
        if params.max_tokens is not None:
            self.observe("vllm:request_params_max_tokens", labels, params.max_tokens)
        if decode_s is not None and longest > 1:
            seconds_per_token = decode_s / (longest - 1)
            self.observe("vllm:request_time_per_output_token_seconds", labels, seconds_per_token)
        self._record_tenant(job.caller.tenant, model, usage, reason)
        history.record_request_end(job, usage, reason)

    def _record_tenant(self, tenant: str, model: str, usage: Usage, reason: str) -> None:
        labels = (tenant, model)
        self.count("quire:tenant_requests", (*labels, reason))
        self.count("quire:tenant_prompt_tokens", labels, usage.prompt_tokens)
        self.count("quire:tenant_cached_tokens", labels, usage.cached_tokens)
        self.count("quire:tenant_generation_tokens", labels, usage.completion_tokens)

    def record_tool_parse(self, job: Job, *, called: bool) -> None:
        """A tool parser has read an output to its end."""
        kind = job.endpoint.replace(".", "_")
        labels = (
            job.model.base,
            "streaming" if job.stream else "non_streaming",
            "tool_call" if called else "no_tool_call",
            kind if kind in ("chat_completions", "responses") else "other",
        )
        self.count("vllm:tool_call_parser_invocations", labels)

    def refused(self, job: Job, error: QuireError) -> None:
        """A request was rejected by limits or budgets."""
        labels = (job.caller.tenant, job.model.base, error.code)
        self.count("quire:tenant_refusals", labels)
        history.refused(job)

    def http(
        self,
        *,
        handler: str,
        method: str,
        status: int,
        seconds: float,
        received: int,
        sent: int,
    ) -> None:
        """A response of the API has ended. `received`, `sent`: bytes of the bodies."""
        method = method if method in _METHODS else NONE
        self.count("http_requests", (handler, method, f"{status // 100}xx"))
        self.observe("http_request_duration_seconds", (handler, method), seconds)
        self.observe("http_request_duration_highr_seconds", (), seconds)
        self.observe("http_request_size_bytes", (handler,), received)
        self.observe("http_response_size_bytes", (handler,), sent)

    def drain(self) -> dict[str, float]:
        """Remove and return the increments, by field of the Redis hash."""
        increments: dict[str, float] = {}
        for (name, labels), distribution in self._distributions.items():
            for metric_name in (name, _OLDER_NAMES[name]) if name in _OLDER_NAMES else (name,):
                for index, count in enumerate(distribution.counts):
                    if count:
                        increments[field_of(metric_name, labels, str(index))] = count
                increments[field_of(metric_name, labels, "sum")] = distribution.total
        for (name, labels), count in self._counters.items():
            increments[field_of(name, labels, "")] = count
        self._distributions, self._counters = {}, {}
        return increments

    def restore(self, increments: dict[str, float]) -> None:
        """Restore increments that could not be written."""
        for field, amount in increments.items():
            name, labels, part = split_field(field)
            if name in _OLDER_NAMES.values():
                continue  # restored together with the other
            if not part:
                self.count(name, labels, int(amount))
                continue
            distribution = self._distributions.setdefault(
                (name, labels), _Distribution(FAMILIES[name].buckets)
            )
            if part == "sum":
                distribution.total += amount
            else:
                distribution.counts[int(part)] += int(amount)


recorder = Recorder()
