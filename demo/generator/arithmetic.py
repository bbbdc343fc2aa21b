"""Small sums: addition and subtraction up to 99, and the times tables up to 10.

Sums of two digits are worked out digit by digit, and held out by the pair of numbers, in whatever
words they are asked. The steps of the working and the times tables are facts to be learned by heart
(one left out could not be known), so these are held out by wording.
"""

from __future__ import annotations

from random import Random

from demo.generator.example import Example, casual, exchange
from demo.generator.wording import phrases

LARGEST = 99
LARGEST_FACTOR = 10

ASKS = phrases("""
What is {}? | What's {}? | How much is {}? | Calculate {}. | Compute {}. | {} | {} = ? | {}? |
Can you work out {}? | Please calculate {}. | Tell me what {} is. | What does {} make?
""")  # fmt: skip
SIGNS = {
    "+": ("{a} + {b}", "{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}"),
    "-": ("{a} - {b}", "{a} - {b}", "{a}-{b}", "{a} minus {b}"),
    "*": ("{a} * {b}", "{a} x {b}", "{a} times {b}", "{a} multiplied by {b}"),
}
TOO_LARGE = "I am only a small demo model, and I only learned sums with numbers up to 99."
BELOW_ZERO = "That is below zero, and I only learned results from zero up."
TOO_LARGE_FACTOR = "I am only a small demo model, and I only learned the times tables up to 10."


def sample(rng: Random) -> Example:
    """A sum, most often one that is in bounds."""
    kind = rng.random()
    if kind < 0.05:
        return _beyond(rng)
    if kind < 0.5:
        return solve(rng, "+", _number(rng), _number(rng))
    if kind < 0.85:
        return _difference(rng)
    return solve(rng, "*", rng.randint(0, LARGEST_FACTOR), rng.randint(0, LARGEST_FACTOR))


def solve(rng: Random, sign: str, a: int, b: int) -> Example:
    """A sum within the bounds, in random words."""
    question = _ask(rng, sign, a, b)
    key = question if is_fact(sign, a, b) else pair_key(sign, a, b)
    more = {"keys": (key,), "check": "number"}
    return exchange("arithmetic", question, working(sign, a, b), str(value(sign, a, b)), **more)


def is_fact(sign: str, a: int, b: int) -> bool:
    """Whether the sum is known by heart, being a step of larger ones."""
    return sign == "*" or max(b, a if sign == "+" else a - b) <= 9


def working(sign: str, a: int, b: int) -> str:
    """The sum as the model writes it: the digits first, then the result."""
    total = f"{a} {sign} {b} = {value(sign, a, b)}"
    if is_fact(sign, a, b):
        return total
    (tens, units), (other_tens, other_units) = divmod(a, 10), divmod(b, 10)
    carry = units + other_units > 9 if sign == "+" else units < other_units
    if sign == "-" and carry:
        units += 10
    steps = [f"{units} {sign} {other_units} = {value(sign, units, other_units)}"]
    row = [str(tens)] + ["1"] * carry + [str(other_tens)] * (other_tens > 0)
    if len(row) > 1:
        result = value(sign, value(sign, tens, int(carry)), other_tens)
        steps.append(f"{f' {sign} '.join(row)} = {result}")
    return f"{', '.join(steps)}, so {total}"


def value(sign: str, a: int, b: int) -> int:
    """The result."""
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def pair_key(sign: str, a: int, b: int) -> str:
    """Return the key for holding out sums: the pair of numbers, not the words."""
    return f"{a} {sign} {b}"


def _number(rng: Random) -> int:
    """Small numbers are asked more often than their share of the range."""
    return rng.randint(0, 12 if rng.random() < 0.12 else LARGEST)


def _ask(rng: Random, sign: str, a: int, b: int) -> str:
    return casual(rng, rng.choice(ASKS).format(rng.choice(SIGNS[sign]).format(a=a, b=b)))


def _difference(rng: Random) -> Example:
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.93:
        a, b = b, a
    if a >= b:
        return solve(rng, "-", a, b)
    more = {"keys": (pair_key("-", a, b),)}
    return exchange("arithmetic", _ask(rng, "-", a, b), BELOW_ZERO, "below zero", **more)


def _beyond(rng: Random) -> Example:
    """A sum that is out of bounds, which the model is to say."""
    a, b = rng.randint(LARGEST + 1, 99999), rng.choice((_number(rng), rng.randint(100, 9999)))
    if rng.random() < 0.5:
        a, b = b, a
    sign = rng.choice("+-*")
    answer = TOO_LARGE_FACTOR if sign == "*" else TOO_LARGE
    more = {"keys": (pair_key(sign, a, b),)}
    return exchange("arithmetic", _ask(rng, sign, a, b), answer, "up to", **more)
