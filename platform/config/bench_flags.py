"""The flags of `manage.py bench`. Where vLLM's benchmarks have a flag, its name is an alias."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from pathlib import Path

from django.conf import settings

from common.installation import PROGRAM
from engine.contract.engine_config import add_cli_args

#: Subcommands that take engine settings.
WITH_ENGINE = ("latency", "throughput")
#: Default ranges of token counts, both ends included.
INPUT_LEN, OUTPUT_LEN = (128, 512), (64, 128)
BENCH_FLAGS = frozenset({"model", "served_model_name"})


def add_forms(parser: ArgumentParser) -> None:
    """Add a subcommand for each kind of benchmark."""
    forms = parser.add_subparsers(
        dest="form", required=True, metavar="latency|throughput|serve|kernels"
    )
    _latency(forms.add_parser("latency", help="one batch from prompt to last token, here"))
    _throughput(forms.add_parser("throughput", help="many requests at once, here"))
    _serve(forms.add_parser("serve", help="streaming load on a running server"))
    kernels = "Time a GPU's kernels one by one, then an 8B-shaped model on them."
    forms.add_parser("kernels", help="the GPU's kernels, here", description=kernels)


def _latency(parser: ArgumentParser) -> None:
    parser.description = (
        "Run one batch from its prompts to its last token, some times, and print how long that "
        "took, time to the first token (ttft) and between tokens (itl), and how many tokens a "
        "second it decodes, with the bytes of weights and KV cache that it reads for them as a "
        "part of the memory bandwidth measured in the same run."
    )
    _count(parser, "--batch-size", 1, "sequences that run together")
    _count(parser, "--input-len", 32, "tokens of each prompt")
    _count(parser, "--output-len", 128, "tokens to generate", minimum=2)
    _count(parser, "--repeats", 3, "timed runs", "--num-iters")
    _count(parser, "--warmups", 1, "runs before these", "--num-iters-warmup", minimum=0)
    _engine(parser)


def _throughput(parser: ArgumentParser) -> None:
    parser.description = (
        "Submit all requests at once and print output and total tokens a second, the arithmetic "
        "as a part of the float32 matrix-product rate measured in the same run (sgemm), time to "
        "the first token (ttft), between tokens (itl) and of the engine's steps."
    )
    parser.add_argument(
        "--dataset",
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="JSON file of conversations in ShareGPT's format: --num-prompts first questions drawn "
        "from it, each with as many output tokens as its reply has (default: random prompts)",
    )
    _workload(parser)
    _engine(parser)


def _serve(parser: ArgumentParser) -> None:
    parser.description = (
        "Send streamed completions of random prompts to a running server, ours or another "
        "OpenAI-compatible one, and print output tokens a second, time to the first token (ttft), "
        "between tokens (itl, and its mean for each request: tpot) and of whole requests (e2e), "
        "as the client sees them."
    )
    parser.add_argument(
        "--url",
        "--base-url",
        default="http://127.0.0.1:8000",
        help="URL of any OpenAI-compatible server, without /v1 (default: %(default)s)",
    )
    parser.add_argument(
        "--model", help="the served model's name (default: the first that the server lists)"
    )
    parser.add_argument(
        "--api-key",
        default=settings.QUIRE.api_key.get_secret_value(),
        help=f"API key; `{PROGRAM} up` prints one (default: the variable QUIRE_API_KEY)",
    )
    parser.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=_levels,
        default=[1, 8, 32],
        metavar="N,...",
        help="closed loop: numbers of requests in flight, one after the other (default: 1,8,32)",
    )
    parser.add_argument(
        "--request-rate",
        type=_rate,
        metavar="X",
        help="open loop instead: this many requests a second, at random times",
    )
    parser.add_argument(
        "--retry",
        action="store_true",
        help="ask again when the server is full (429 and 503), after its Retry-After, as SDKs do; "
        "prints how many were refused, and for how long",
    )
    parser.add_argument(
        "--vocab-size",
        type=_IntWithMinimum(8),
        default=2048,
        metavar="N",
        help="prompts are random token ids below this, at most the model's (default: %(default)s)",
    )
    _workload(parser, "--random-input-len", "--random-output-len", "--seed")
    _json(parser)


def _workload(
    parser: ArgumentParser,
    input_len: str = "--random-input-len",
    output_len: str = "--random-output-len",
    *seed: str,
) -> None:
    _count(parser, "--num-prompts", 64, "requests")
    text = "tokens of each {}, or a range to draw from (default: {}-{})"
    for flag, alias, what, low, high in (
        ("--input-len", input_len, "prompt", *INPUT_LEN),
        ("--output-len", output_len, "output", *OUTPUT_LEN),
    ):
        parser.add_argument(
            flag, alias, type=_range, metavar="N|LOW-HIGH",
            help=text.format(what, low, high),
        )  # fmt: skip
    parser.add_argument(
        "--workload-seed", *seed, type=_IntWithMinimum(0), default=7, metavar="N",
        help="seed of lengths and prompts (default: %(default)s)",
    )  # fmt: skip


def _engine(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=str(settings.BASE_DIR / "demo" / "model"),
        metavar="FOLDER",
        help="folder or GGUF file (default: the demo model)",
    )
    _json(parser)
    add_cli_args(parser, skip=BENCH_FLAGS)


def _json(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        "--output-json",
        type=_writable,
        metavar="FILE",
        help="append the figures to FILE, a JSON object a line",
    )


def _count(
    parser: ArgumentParser, flag: str, default: int, what: str, *also: str, minimum: int = 1
) -> None:
    parser.add_argument(
        flag, *also, type=_IntWithMinimum(minimum), default=default, metavar="N",
        help=f"{what} (default: {default})",
    )  # fmt: skip


class _IntWithMinimum:
    """Return a parser of integers with a lower bound."""

    def __init__(self, low: int) -> None:
        self._low = low

    def __call__(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = self._low - 1
        if value < self._low:
            raise ArgumentTypeError(f"must be a whole number of at least {self._low}, got {text!r}")
        return value


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"must be a number above 0, or inf, got {text!r}")
    return value


def _range(text: str) -> tuple[int, int]:
    """Parse `128` or `128-512`, both ends included."""
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise ArgumentTypeError(f"must be N or LOW-HIGH, rising from at least 1, got {text!r}")
    return bounds


def _levels(text: str) -> list[int]:
    """Parse comma-separated concurrency levels."""
    return [_IntWithMinimum(1)(part) for part in text.split(",")]


def _writable(text: str) -> Path:
    """Open a file for appending, before the benchmark runs rather than after minutes of it."""
    path = Path(text)
    try:
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ArgumentTypeError(f"{text} can't be written: {error.strerror}") from error
    return path
