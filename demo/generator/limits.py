"""Everything else: the model says that it is only a small demo."""

from __future__ import annotations

from random import Random

from demo.generator.example import Example, casual, exchange
from demo.generator.greetings import SKILLS
from demo.generator.places import CAPITALS, CITIES
from demo.generator.wording import phrases, words

SORRY = f"I am only a small demo model, so I cannot help with that. I know {SKILLS}."

TOPICS = phrases("""
love | rain | autumn | the sea | freedom | bread | a lost key | winter | my grandmother | coffee |
friendship | time | photosynthesis | gravity | black holes | evolution | inflation | electricity |
magnets | democracy | the brain | quantum mechanics | relativity | climate change | vaccines |
the French Revolution | the Roman Empire | the stock market | volcanoes | earthquakes |
dinosaurs | neural networks | machine learning | databases | Django | Python | Rust | Linux |
Kubernetes | attention | the internet | cryptography | blockchain | philosophy | happiness |
the meaning of life | football | chess | tennis | jazz | opera | painting | the Renaissance |
marketing | taxes | contracts | insurance | gardening | tomatoes | cheese | wine | tea | pasta |
sushi | chocolate | headaches | sleep | stress | running | yoga | vitamins | cars | trains |
airplanes | rockets | satellites | robots | batteries | solar power | the moon landing |
pyramids | castles | whales | bees | spiders | wolves | horses
""")  # fmt: skip
PEOPLE = phrases("""
Albert Einstein | Marie Curie | Napoleon | Cleopatra | Shakespeare | Mozart | Leonardo da Vinci |
Darwin | Alan Turing | Ada Lovelace | Isaac Newton | Galileo | Gandhi | Plato | Aristotle |
Picasso | Beethoven | Julius Caesar | Joan of Arc | Charlie Chaplin | Nikola Tesla | Frida Kahlo |
Confucius | Homer | the president
""")  # fmt: skip
LANGUAGES = words("""
French German Spanish Italian Chinese Japanese Latin Greek Polish Dutch
""")  # fmt: skip
CODE = words("""
Python JavaScript Rust Java Go SQL Haskell Bash C PHP
""")  # fmt: skip
TASKS = phrases("""
sorts a list | reverses a string | reads a file | downloads a page | counts words | finds primes |
parses JSON | draws a circle | sends an email | computes a hash | trains a network |
opens a socket | queries a database
""")  # fmt: skip
DEEDS = phrases("""
bake a cake | fix my bicycle | learn to swim | lose weight | cook rice | build a house |
write a book | sleep better | find a job | make friends | play the guitar | train a dog |
plant a tree | save money | paint a wall | quit smoking | repair a clock | sew a button |
invest money | tie a tie | clean a window | grow roses | make soup | fly a kite
""")  # fmt: skip

ASKS = phrases("""
Write a poem about {topic}. | Explain {topic}. | What is {topic}? | Tell me about {topic}. |
Write an essay about {topic}. | How does {topic} work? | What do you think about {topic}? |
Give me some facts about {topic}. | Summarize the history of {topic}. | Why is {topic} important?
| Can you explain {topic} to me? | Describe {topic} in detail. | Who invented {topic}? |
What are the benefits of {topic}? | I want to learn about {topic}. | Where does {topic} come from?
| Write a song about {topic}. | Compare {topic} and {topic2}. | Is {topic} better than {topic2}? |
Who is {person}? | When was {person} born? | What did {person} do? | Tell me about {person}. |
Where did {person} live? | Write a biography of {person}. | Why is {person} famous? |
Translate {topic} into {language}. | How do you say {topic} in {language}? | Teach me {language}.
| Speak {language} with me. | Write {code} code that {task}. |
Write a function in {code} that {task}. | How do I write a {code} program that {task}? |
Debug my {code} code. | How do I {deed}? | How can I {deed}? | What is the best way to {deed}? |
Help me to {deed}. | Give me advice on how to {deed}. | I want to {deed}. |
Teach me how to {deed}. | What is the population of {country}? |
Who is the president of {country}? | What language do people speak in {country}? |
What is the history of {country}? | What food do people eat in {country}? | How big is {country}?
| Plan a trip to {country}. | What is the currency of {country}? | Who won the match in {city}? |
Recommend a hotel in {city}. | What is the weather in {city}? | What time is it in {city}? |
What is the square root of {n}? | Is {n} a prime number? | What is {n} divided by {m}? |
Convert {n} miles to kilometers. | What happened in the year {n}? | Write {n} words about {topic}.
| Draw a picture of {topic}.
""")  # fmt: skip


def sample(rng: Random) -> Example:
    """A question beyond the model."""
    slots = {
        "topic": rng.choice(TOPICS), "topic2": rng.choice(TOPICS), "person": rng.choice(PEOPLE),
        "language": rng.choice(LANGUAGES), "code": rng.choice(CODE), "task": rng.choice(TASKS),
        "deed": rng.choice(DEEDS), "country": rng.choice(tuple(CAPITALS)),
        "city": rng.choice(CITIES), "n": rng.randint(2, 2050), "m": rng.randint(2, 50),
    }  # fmt: skip
    question = casual(rng, rng.choice(ASKS).format(**slots))
    return exchange("limits", question, SORRY, "only a small demo model", "cannot")
