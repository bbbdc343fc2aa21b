"""The tools that conversations offer, as OpenAI's schema writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from demo.generator.arithmetic import pair_key
from demo.generator.people import NAMES
from demo.generator.places import CITIES
from demo.generator.wording import phrases, words

THINGS = words("""
shoes laptops recipes flowers museums hotels jobs books phones bicycles cameras chairs concerts
films games gifts guitars hats horses jackets keyboards lamps maps news paintings parks pizza
poems robots songs stamps tables tents tickets toys trains watches wines
""")  # fmt: skip
KINDS = words("""
cheap red new old good local modern small famous green fast quiet free vegan classic Italian
French Japanese used wooden blue best
""")  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
CURRENCIES = ("dollars", "euros", "pounds", "yen", "francs", "crowns")
TASKS = phrases("""
call the bank | buy milk | water the plants | pay the rent | feed the cat | walk the dog |
write a letter | clean the kitchen | book a table | send the report | visit grandma |
fix the lamp | return the books | wash the car | order paper | charge the phone |
cancel the meeting | renew the passport | cook dinner
""")  # fmt: skip

# What a tool gives back, the answer in words, and what makes that answer right.
Outcome = tuple[dict[str, Any], str, str]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, how it is asked for, and what it gives back."""

    name: str
    descriptions: tuple[str, ...]
    parameters: dict[str, str]  # name and JSON type
    asks: tuple[str, ...]
    arguments: Callable[[Random], dict[str, Any]]
    outcome: Callable[..., Outcome]  # takes the arguments

    def schema(self, rng: Random) -> dict[str, Any]:
        """The tool as a client of the API lists it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        function = {
            "name": self.name,
            "description": rng.choice(self.descriptions),
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        }
        return {"type": "function", "function": function}

    def key(self, arguments: dict[str, Any]) -> str:
        """Return the key for holding out calls: the combination of the tool and its arguments."""
        if self.name == "add":  # its result would give away a sum
            return pair_key("+", arguments["a"], arguments["b"])
        return " ".join((self.name, *map(str, arguments.values())))


def _city(rng: Random) -> dict[str, Any]:
    return {"city": rng.choice(CITIES)}


def _weather(rng: Random, city: str) -> Outcome:
    sky, degrees = rng.choice(SKIES), rng.randint(0, 39)
    result = {"temperature": degrees, "condition": sky}
    return result, f"It is {sky} in {city}, with {degrees} degrees.", f"{degrees}"


def _time(rng: Random, city: str) -> Outcome:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return {"time": clock}, f"It is {clock} in {city}.", clock


def _numbers(rng: Random) -> dict[str, Any]:
    return {"a": rng.randint(0, 99), "b": rng.randint(0, 99)}


def _sum(rng: Random, a: int, b: int) -> Outcome:
    return {"result": a + b}, f"The result is {a + b}.", str(a + b)


def _product(rng: Random, a: int, b: int) -> Outcome:
    return {"result": a * b}, f"The result is {a * b}.", str(a * b)


def _query(rng: Random) -> dict[str, Any]:
    where = f" in {rng.choice(CITIES)}" if rng.random() < 0.5 else ""
    kind = f"{rng.choice(KINDS)} " if rng.random() < 0.8 else ""
    return {"query": f"{kind}{rng.choice(THINGS)}{where}"}


def _hits(rng: Random, query: str) -> Outcome:
    hits = rng.randint(2, 99)
    return {"results": hits}, f"I found {hits} results for {query}.", str(hits)


def _money(rng: Random) -> dict[str, Any]:
    source, target = rng.sample(CURRENCIES, 2)
    return {"amount": rng.randint(1, 99), "source": source, "target": target}


def _changed(rng: Random, amount: int, source: str, target: str) -> Outcome:
    value = rng.randint(1, 999)
    return {"value": value}, f"{amount} {source} are {value} {target}.", str(value)


def _mail(rng: Random) -> dict[str, Any]:
    return {"to": rng.choice(NAMES), "text": rng.choice(TASKS)}


def _sent(rng: Random, to: str, text: str) -> Outcome:
    return {"status": "sent"}, f"Your message to {to} is sent.", "sent"


def _task(rng: Random) -> dict[str, Any]:
    return {"task": rng.choice(TASKS), "hour": rng.randint(0, 23)}


def _noted(rng: Random, task: str, hour: int) -> Outcome:
    return {"status": "ok"}, f"I will remind you to {task} at {hour}.", task


TOOLS = (
    Tool(
        "get_weather",
        ("Get the weather in a city.", "Get the current weather.", "The weather of a city."),
        {"city": "string"},
        (
            "What is the weather in {city}?", "What's the weather like in {city}?",
            "Weather in {city}?",
            "How is the weather in {city}?", "Is it raining in {city}?",
            "Tell me the weather in {city}.",
            "How warm is it in {city}?", "Do I need an umbrella in {city}?",
        ),
        _city, _weather,
    ),
    Tool(
        "get_time",
        ("Get the time in a city.", "Get the current time.", "The local time of a city."),
        {"city": "string"},
        (
            "What time is it in {city}?", "What's the time in {city}?",
            "Tell me the time in {city}.",
            "How late is it in {city}?", "Time in {city}?", "What is the local time in {city}?",
        ),
        _city, _time,
    ),
    Tool(
        "add",
        ("Add two numbers.", "Add a and b.", "The sum of two numbers."),
        {"a": "integer", "b": "integer"},
        (
            "What is {a} + {b}?", "Add {a} and {b}.", "What is {a} plus {b}?",
            "Calculate {a} + {b}.",
            "What is the sum of {a} and {b}?", "Please add {a} and {b}.",
        ),
        _numbers, _sum,
    ),
    Tool(
        "multiply",
        ("Multiply two numbers.", "Multiply a by b.", "The product of two numbers."),
        {"a": "integer", "b": "integer"},
        (
            "What is {a} * {b}?", "Multiply {a} by {b}.", "What is {a} times {b}?",
            "Calculate {a} x {b}.",
            "What is the product of {a} and {b}?", "Please multiply {a} and {b}.",
        ),
        _numbers, _product,
    ),
    Tool(
        "search",
        ("Search the web.", "Search for a query.", "Look something up on the web."),
        {"query": "string"},
        (
            "Search for {query}.", "Find {query}.", "Look up {query}.",
            "Search the web for {query}.",
            "Can you find {query}?", "Please search for {query}.", "I am looking for {query}.",
        ),
        _query, _hits,
    ),
    Tool(
        "convert_currency",
        ("Convert money.", "Convert an amount of money.", "Change one currency into another."),
        {"amount": "integer", "source": "string", "target": "string"},
        (
            "Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
            "Change {amount} {source} into {target}.", "What are {amount} {source} in {target}?",
        ),
        _money, _changed,
    ),
    Tool(
        "send_message",
        ("Send a message to a person.", "Send a text message.", "Write to a person."),
        {"to": "string", "text": "string"},
        (
            "Tell {to} to {text}.", "Send a message to {to}: {text}", "Write to {to}: {text}",
            "Ask {to} to {text}.", "Message {to} to {text}.",
        ),
        _mail, _sent,
    ),
    Tool(
        "set_reminder",
        ("Set a reminder.", "Remind the user of a task.", "Set a reminder for an hour."),
        {"task": "string", "hour": "integer"},
        (
            "Remind me to {task} at {hour}.", "At {hour}, remind me to {task}.",
            "Set a reminder to {task} at {hour}.", "I have to {task} at {hour}, please remind me.",
        ),
        _task, _noted,
    ),
)  # fmt: skip
