"""Short stories from templates, of a hundred to two hundred tokens."""

from __future__ import annotations

from random import Random

from demo.generator.example import Example, casual, exchange
from demo.generator.people import NAMES
from demo.generator.wording import phrases, words

HEROES = words("""
fox bear rabbit mouse owl cat dog wolf duck frog hedgehog squirrel turtle lion elephant penguin
dragon robot knight princess wizard pirate farmer baker sailor painter gardener fisherman giant
fairy
""")  # fmt: skip
TRAITS = words("""
brave little clever shy kind curious hungry lonely cheerful tiny proud sleepy young old gentle
""")  # fmt: skip
PLACES = phrases("""
a deep forest | a small village | a quiet valley | an old castle | a house by the sea |
a town on a hill | a garden full of roses | a cave in the mountains | a boat on the river |
a windy island
""")  # fmt: skip
THINGS = phrases("""
a golden key | a silver bell | a lost map | a red balloon | a shining stone | a warm lantern |
a wooden flute | a magic seed | a broken clock | a blue feather | a tiny crown | a secret letter
""")  # fmt: skip
FRIENDS = phrases("""
a wise owl | a friendly snail | a singing bird | an old turtle | a small bee | a quick hare |
a quiet cat | a tall horse | a happy goat | a young deer
""")  # fmt: skip
LESSONS = phrases("""
that a good friend is worth more than gold | that even the smallest can do great things |
that sharing makes everything better | that courage grows when you use it |
that patience opens every door | that it is good to ask for help
""")  # fmt: skip
BODIES = (
    "Once upon a time, there was {a} {trait} {hero} named {name} who lived in {place}. "
    'One morning, {name} found {thing} under a tree. "Whose could it be?" said {name}. On '
    'the path, {name} met {friend}. "I know where it belongs," said the new friend, and '
    "the two went off together. They walked all day, over the hills and through the rain. "
    "In the evening they came to a little door, and there they gave {the_thing} back. "
    "Everyone danced and sang until the stars came out. {name} learned {lesson}. The end.",
    "Long ago, in {place}, there lived {a} {trait} {hero}. The name of the {hero} was "
    "{name}. Every night {name} dreamed of {thing}, but nobody had ever seen one. One day "
    "a storm came, and {name} had to hide from the wind. There sat {friend}, cold and "
    "afraid. {name} shared some bread and a blanket, and they talked until the storm was "
    "over. When the sun came up, the friend smiled and gave {name} {thing}. The {hero} "
    "went home full of joy, and learned {lesson}. The end.",
    "There once was {a} {trait} {hero} called {name}. {name} lived in {place} and was "
    "often bored. So one day {name} packed a small bag and went to look for {thing}. On "
    "the first day, {name} met {friend}, who wanted to come along. On the second day, "
    "they crossed a wide river. On the third day, they were lost, and {name} began to "
    'cry. "Do not worry," said the friend, "we have each other." Just then they saw '
    "{thing}, shining in the grass. They carried it home, and {name} learned {lesson}. "
    "The end.",
)  # fmt: skip
ASKS = phrases("""
Tell me a story about {a} {hero}. | Tell me a short story about {a} {trait} {hero}. |
Write a short story about {a} {hero}. | Write a story about {a} {trait} {hero}. |
Can you tell me a story about {a} {trait} {hero}? | I want to hear a story about {a} {hero}. |
Please tell a story about {a} {trait} {hero}. | A story about {a} {trait} {hero}, please. |
Make up a story about {a} {trait} {hero}. | Tell my children a story about {a} {trait} {hero}. |
Do you know a story about {a} {trait} {hero}? | Story about {a} {trait} {hero}
""")  # fmt: skip


def sample(rng: Random) -> Example:
    """Return a conversation in which the user asks for a story."""
    trait, hero, ask = rng.choice(TRAITS), rng.choice(HEROES), rng.choice(ASKS)
    first = trait if "{trait}" in ask else hero
    question = casual(rng, ask.format(a=_article(first), trait=trait, hero=hero))
    story = tell(rng, trait, hero)
    return exchange("stories", question, story, hero, "end", check="story")


def tell(rng: Random, trait: str, hero: str) -> str:
    """A story about the hero."""
    thing = rng.choice(THINGS)
    return rng.choice(BODIES).format(
        a=_article(trait),
        trait=trait,
        hero=hero,
        name=rng.choice(NAMES),
        place=rng.choice(PLACES),
        thing=thing,
        the_thing="the " + thing.split(" ", 1)[1],
        friend=rng.choice(FRIENDS),
        lesson=rng.choice(LESSONS),
    )


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
