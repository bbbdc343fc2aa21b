"""Days of the week and months of the year."""

from __future__ import annotations

from random import Random

from demo.generator.example import Example, casual, exchange
from demo.generator.wording import phrases, words

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = words("""
January February March April May June July August September October November December
""")  # fmt: skip
LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = words("""
first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
""")  # fmt: skip

AFTER = phrases("""
What {kind} comes after {x}? | Which {kind} is after {x}? | What {kind} follows {x}? |
Which {kind} comes right after {x}? | What is the {kind} after {x}? | After {x} comes what {kind}?
| Tell me the {kind} after {x}. | What's the next {kind} after {x}? | Which {kind} follows {x}?
""")  # fmt: skip
BEFORE = phrases("""
What {kind} comes before {x}? | Which {kind} is before {x}? | What {kind} precedes {x}? |
Which {kind} comes right before {x}? | What is the {kind} before {x}? |
Tell me the {kind} before {x}. | What {kind} is just before {x}?
""")  # fmt: skip
TODAY = phrases("""
If today is {x}, what day is tomorrow? | Today is {x}. What day is tomorrow? |
Today is {x}, so what is tomorrow? | It is {x} today. Which day is tomorrow?
""")  # fmt: skip
YESTERDAY = tuple(ask.replace("tomorrow", "yesterday").replace("is y", "was y") for ask in TODAY)
LENGTH = phrases("""
How many days are in {x}? | How many days does {x} have? | How long is {x} in days? |
{x} has how many days? | What is the number of days in {x}? | Tell me how many days {x} has.
""")  # fmt: skip
PLACE = phrases("""
What is the {n} month of the year? | Which month is the {n} one? | Name the {n} month. |
Which month comes {n} in the year? | Tell me the {n} month of the year.
""")  # fmt: skip
DAY_PLACE = phrases("""
What is the {n} day of the week? | Which day of the week is the {n} one? |
Name the {n} day of the week. | Tell me the {n} day of the week.
""")  # fmt: skip
WEEKEND = phrases("""
Is {x} a weekend day? | Is {x} on the weekend? | Does {x} belong to the weekend? |
Is {x} part of the weekend? | Tell me, is {x} a weekend day?
""")  # fmt: skip
COUNTS = (
    ("days", "a week", "7"), ("days", "a year", "365"), ("months", "a year", "12"),
    ("hours", "a day", "24"), ("minutes", "an hour", "60"), ("seconds", "a minute", "60"),
    ("weeks", "a year", "52"), ("seasons", "a year", "4"), ("days", "a leap year", "366"),
)  # fmt: skip
COUNT = phrases("""
How many {unit} are in {span}? | How many {unit} are there in {span}? |
How many {unit} does {span} have? | {span} has how many {unit}? |
Tell me how many {unit} {span} has. | What is the number of {unit} in {span}?
""")  # fmt: skip


def sample(rng: Random) -> Example:
    """One question of the calendar."""
    kinds = (_neighbour, _neighbour, _today, _length, _place, _weekend, _count)
    return rng.choice(kinds)(rng)


def _say(rng: Random, question: str, answer: str, *needles: str) -> Example:
    return exchange("calendar", casual(rng, _capital(question)), answer, *needles)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _neighbour(rng: Random) -> Example:
    kind, names = rng.choice((("day", DAYS), ("month", MONTHS)))
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    asks, word = (AFTER, "after") if step == 1 else (BEFORE, "before")
    name, other = names[index], names[(index + step) % len(names)]
    question = rng.choice(asks).format(kind=kind, x=name)
    return _say(rng, question, f"The {kind} {word} {name} is {other}.", other)


def _today(rng: Random) -> Example:
    index, step = rng.randrange(7), rng.choice((1, -1))
    other = DAYS[(index + step) % 7]
    asks, verb = (TODAY, "Tomorrow is") if step == 1 else (YESTERDAY, "Yesterday was")
    return _say(rng, rng.choice(asks).format(x=DAYS[index]), f"{verb} {other}.", other)


def _length(rng: Random) -> Example:
    index = rng.randrange(12)
    month, days = MONTHS[index], LENGTHS[index]
    tail = ", or 29 in a leap year" if month == "February" else ""
    question = rng.choice(LENGTH).format(x=month)
    return _say(rng, question, f"{month} has {days} days{tail}.", str(days))


def _place(rng: Random) -> Example:
    if rng.random() < 0.35:
        index = rng.randrange(7)
        question = rng.choice(DAY_PLACE).format(n=ORDINALS[index])
        answer = f"Counting from Monday, the {ORDINALS[index]} day of the week is {DAYS[index]}."
        return _say(rng, question, answer, DAYS[index])
    index = rng.randrange(12)
    question = rng.choice(PLACE).format(n=ORDINALS[index])
    answer = f"The {ORDINALS[index]} month of the year is {MONTHS[index]}."
    return _say(rng, question, answer, MONTHS[index])


def _weekend(rng: Random) -> Example:
    day = rng.choice(DAYS)
    yes = day in ("Saturday", "Sunday")
    answer = f"Yes, {day} is on the weekend." if yes else f"No, {day} is a working day."
    return _say(rng, rng.choice(WEEKEND).format(x=day), answer, "Yes" if yes else "No")


def _count(rng: Random) -> Example:
    unit, span, number = rng.choice(COUNTS)
    question = rng.choice(COUNT).format(unit=unit, span=span)
    return _say(rng, question, f"There are {number} {unit} in {span}.", number)
