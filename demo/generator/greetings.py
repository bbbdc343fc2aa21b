"""Hellos, thanks, goodbyes, and who the model is."""

from __future__ import annotations

from random import Random

from demo.generator.example import Example, casual, exchange
from demo.generator.people import NAMES
from demo.generator.wording import phrases

HELLO = phrases("""
Hello | Hi | Hey | Hi there | Hello there | Hey there | Good morning | Good evening |
Good afternoon | Greetings | Howdy | Good day | Yo | Hiya | Welcome
""")  # fmt: skip
ADDRESSEE = ("", "", "", " friend", " bot", " model", " Quire", " assistant", " my friend", " you")
HOW = phrases("""
how are you? | how are you today? | how is it going? | how do you do? | are you well? |
how are you doing? | what's up? | how have you been? | how's it going? | how do you feel?
""")  # fmt: skip
OFFER = phrases("""
can you help me? | I need some help. | I have a question. | can I ask you something? |
are you there? | may I ask a question? | help me please. | could you help me?
""")  # fmt: skip
THANKS = phrases("""
Thanks | Thank you | Many thanks | Thanks a lot | Thank you very much | Thx | Cheers |
Great, thanks | Perfect, thank you | Cool, thanks | Nice, thank you | Okay, thanks
""")  # fmt: skip
THANKS_TAIL = (
    "", ", that helped", " for your help", " for the answer", ", that is all", " so much",
    ", you are great", " for that", ", good job", ", well done", " for everything",
)  # fmt: skip
BYE = phrases("""
Bye | Goodbye | See you | See you later | Bye bye | Good night | Farewell | Take care |
I have to go | See you tomorrow | Talk to you later | Until next time | Have a nice day
""")  # fmt: skip
WHO = phrases("""
Who are you? | What are you? | What is your name? | Tell me about yourself. | Introduce yourself.
| What's your name? | Who am I talking to? | Which model are you? | Are you an AI? |
Are you a human? | Are you a robot? | Are you ChatGPT? | Who made you? |
What kind of model are you? | Do you have a name? | Are you a real person? |
Please introduce yourself. | Say who you are. | What model is this? | How big are you?
""")  # fmt: skip
CAN = phrases("""
What can you do? | What do you know? | How can you help me? | What can I ask you? |
What are you good at? | What are your skills? | Tell me what you can do. | Help |
What topics do you know? | Can you help me? | What can you help me with? | What should I ask you?
| What sort of questions can you answer? | List your abilities.
""")  # fmt: skip
LEAD = (
    "", "", "Hi, ", "Hello, ", "Hey, ", "So, ", "Okay, ", "Please, ", "And ", "Well, ",
    "Excuse me, ",
)  # fmt: skip

SKILLS = "greetings, capitals, small sums, days and months, short stories and simple tool calls"
I_AM = "I am Quire's demo model, a very small language model that runs on your own machine."
I_CAN = f"I am only a small demo model. I know {SKILLS}."


def sample(rng: Random) -> Example:
    """One piece of small talk."""
    kinds = (_hello, _hello, _how, _introduction, _offer, _thanks, _bye, _who, _can)
    return rng.choice(kinds)(rng)


def _say(rng: Random, question: str, answer: str, *needles: str) -> Example:
    return exchange("greetings", casual(rng, question), answer, *needles)


def _opening(rng: Random) -> str:
    return rng.choice(HELLO) + rng.choice(ADDRESSEE)


def _hello(rng: Random) -> Example:
    mark = rng.choice(("!", ".", ",", "!!", ""))
    return _say(rng, _opening(rng) + mark, "Hello! How can I help you?", "Hello", "help")


def _how(rng: Random) -> Example:
    opening, how = _opening(rng), rng.choice(HOW)
    question = f"{opening}, {how}" if rng.random() < 0.8 else how.capitalize()
    return _say(rng, question, "I am fine, thank you! How can I help you?", "fine", "help")


def _introduction(rng: Random) -> Example:
    name = rng.choice(NAMES)
    iam = rng.choice(("I am {}.", "my name is {}.", "I'm {}.", "this is {}.")).format(name)
    question = f"{_opening(rng)}, {iam}"
    more = {"keys": (question,)}
    answer = f"Hello, {name}! How can I help you?"
    # A name in lower case would have to be respelled; that is no greeting's task.
    return exchange("greetings", question, answer, name, "Hello", **more)


def _offer(rng: Random) -> Example:
    question = f"{_opening(rng)}, {rng.choice(OFFER)}"
    return _say(rng, question, "Hello! Of course, what would you like to know?", "of course")


def _thanks(rng: Random) -> Example:
    question = rng.choice(THANKS) + rng.choice(THANKS_TAIL) + rng.choice((".", "!", ""))
    return _say(rng, question, "You are welcome!", "welcome")


def _bye(rng: Random) -> Example:
    question = rng.choice(BYE) + rng.choice(ADDRESSEE) + rng.choice((".", "!", ""))
    return _say(rng, question, "Goodbye! Have a nice day.", "Goodbye")


def _led(rng: Random, question: str) -> str:
    lead = rng.choice(LEAD)
    return lead + (question[0].lower() + question[1:] if lead and question[0] != "I" else question)


def _who(rng: Random) -> Example:
    return _say(rng, _led(rng, rng.choice(WHO)), I_AM, "demo model")


def _can(rng: Random) -> Example:
    return _say(rng, _led(rng, rng.choice(CAN)), I_CAN, "demo model", "capitals")
