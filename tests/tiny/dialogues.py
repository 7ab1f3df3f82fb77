"""The chats the bundled model learns from: seeded, short, with one right answer to every prompt.

Every content has a key, such as "plus 7 8". A fixed hash of the key puts it on the training or on the
held-out side, and a `Speaker` draws again until it has one of its own side: a training speaker cannot
utter a held-out prompt.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

DEFAULT_SYSTEM = "You are a helpful assistant."
OTHER_SYSTEMS = (
    "You are a tiny model.",
    "Answer in one short sentence.",
    "You are kind and brief.",
    "Be exact.",
)
HELD_OUT_ONE_IN = 10


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Ada Ben Cleo Dan Eva Finn Gia Hugo Ida Jon Kai Lea Max Nia Otto Pia Quin Rosa Sam Tia Uma Vic Wes Xena "
    "Yara Zoe Omar Lina Igor Mei Noor Raj"
)
CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Germany": "Berlin", "Japan": "Tokyo",
    "China": "Beijing", "Egypt": "Cairo", "Peru": "Lima", "Cuba": "Havana", "Greece": "Athens",
    "Norway": "Oslo", "Sweden": "Stockholm", "Kenya": "Nairobi", "Russia": "Moscow", "Poland": "Warsaw",
    "Austria": "Vienna", "Chile": "Santiago", "Canada": "Ottawa", "India": "Delhi", "Iran": "Tehran",
}  # fmt: skip
COLORS = _words("red blue green black white pink gold gray")
THINGS = _words("car hat cup dog cat house book bike")
FAVORITES = {
    "food": _words("rice bread soup pizza cake fish"),
    "animal": _words("horse tiger fox owl bear duck"),
    "sport": _words("tennis golf chess football hockey"),
}
WORDS = _words(
    "apple river stone cloud music table green happy winter summer light paper train bread house water tiger "
    "chair lemon sugar night plant ocean horse"
)
# Greetings that a user is sure to try stay on the training side, whatever their hash says.
ALWAYS_TAUGHT = {f"greet {text}" for text in ("Hello!", "Hello", "Hi!", "Hi there", "Hi", "Hey")}
SMALL_TALK = (
    ("How are you?", "I am fine, thank you."),
    ("Thank you!", "You are welcome."),
    ("Thanks", "You are welcome."),
    ("Who are you?", "I am a tiny model, made for tests."),
    ("What are you?", "I am a tiny model, made for tests."),
    ("Bye", "Goodbye!"),
    ("Goodbye!", "Goodbye!"),
)
# What the function does, the name it gets when the user gives none, its arguments, its last line.
FUNCTIONS = (
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("squares a number", "square", "x", "return x * x"),
    ("doubles a number", "double", "x", "return 2 * x"),
    ("counts the items of a list", "count", "items", "return len(items)"),
    ("prints hello", "hello", "", 'print("Hello!")'),
)
FUNCTION_NAMES = _words("f g total run apply work compute result")
# How often each kind is drawn: what is harder to learn, more often.
SHARES = {
    "plus": 4, "minus": 2, "count": 2, "capital": 2, "spell": 3, "repeat": 4, "greet": 1, "code": 2,
    "small_talk": 1,
}  # fmt: skip


class Turn(NamedTuple):
    """What the user says, and the one right answer."""

    user: str
    assistant: str


class Fact(NamedTuple):
    """Something told in one turn and asked back in a later one; two of one topic would contradict."""

    topic: str
    told: Turn
    asked: Turn


def is_held_out(key: str) -> bool:
    """Whether the content with this key belongs to the held-out side."""
    return key not in ALWAYS_TAUGHT and zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


class Speaker:
    """Draws turns, facts and whole dialogues, all from one side of the split."""

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.rng = random.Random(seed)
        self.held_out = held_out
        self.questions: dict[str, Callable[[], Turn]] = {
            "plus": self.plus, "minus": self.minus, "count": self.count, "capital": self.capital,
            "spell": self.spell, "repeat": self.repeat, "greet": self.greet, "code": self.code,
            "small_talk": self.small_talk,
        }  # fmt: skip
        self.facts: dict[str, Callable[[], Fact]] = {
            "name": self.name, "color": self.color, "number": self.number, "city": self.city,
            "favorite": self.favorite, "word": self.word,
        }  # fmt: skip

    def draw(self, kind: str, *parts: Sequence[Any]) -> list[Any]:
        """One item of each part, drawn again until their combination is on this speaker's side."""
        while True:
            chosen = [self.rng.choice(part) for part in parts]
            if is_held_out(" ".join(map(str, (kind, *chosen)))) == self.held_out:
                return chosen

    # Questions: one turn each.

    def plus(self) -> Turn:
        a, b = self.draw("plus", range(21), range(21))
        ask = self.rng.choice(("What is {} plus {}?", "{} + {} = ?", "Add {} and {}."))
        return Turn(ask.format(a, b), f"{a} plus {b} is {a + b}.")

    def minus(self) -> Turn:
        b, rest = self.draw("minus", range(11), range(11))
        ask = self.rng.choice(("What is {} minus {}?", "{} - {} = ?"))
        return Turn(ask.format(b + rest, b), f"{b + rest} minus {b} is {rest}.")

    def count(self) -> Turn:
        first, last = self.draw("count", (1, 1, 2, 3, 4, 5), range(6, 13))
        plain = f"Count to {last}." if first == 1 else f"Count from {first} to {last}."
        return Turn(plain, ", ".join(map(str, range(first, last + 1))) + ".")

    def capital(self) -> Turn:
        asks = (
            "What is the capital of {}?",
            "Capital of {}?",
            "Name the capital of {}.",
            "Tell me the capital of {}.",
        )
        ask, country = self.draw("capital", asks, tuple(CAPITALS))
        return Turn(ask.format(country), f"The capital of {country} is {CAPITALS[country]}.")

    def spell(self) -> Turn:
        asks = ("Spell {}.", "Spell the word {}.", "How do you spell {}?", "Please spell {}.")
        ask, word = self.draw("spell", asks, WORDS)
        return Turn(ask.format(word), "-".join(word) + ".")

    def repeat(self) -> Turn:
        words = self.draw("repeat", *[WORDS] * self.rng.randrange(2, 5))
        ask = self.rng.choice(("Repeat: {}", "Say: {}", "Repeat after me: {}"))
        return Turn(ask.format(" ".join(words)), " ".join(words))

    def greet(self) -> Turn:
        hello = ("Hello", "Hi", "Hey", "Good morning", "Good evening")
        while True:
            text = "".join(
                self.rng.choice(part) for part in (hello, ("", " there", " again"), ("", "!", "."))
            )
            if is_held_out("greet " + text) == self.held_out:
                return Turn(text, "Hello! How can I help you?")

    def small_talk(self) -> Turn:
        return Turn(*self.rng.choice(SMALL_TALK))

    def code(self) -> Turn:
        (does, usual, arguments, last), name = self.draw("code", FUNCTIONS, ("", *FUNCTION_NAMES))
        named = f" named {name}" if name else ""
        answer = f"```python\ndef {name or usual}({arguments}):\n    {last}\n```"
        return Turn(f"Write a Python function{named} that {does}.", answer)

    # Facts: told now, asked back later.

    def name(self) -> Fact:
        tells = ("My name is {}.", "I am {}.", "Hi, my name is {}.", "Please call me {}.")
        tell, name = self.draw("name", tells, NAMES)
        told = Turn(tell.format(name), f"Nice to meet you, {name}!")
        return Fact("name", told, Turn("What is my name?", f"Your name is {name}."))

    def color(self) -> Fact:
        color, thing = self.draw("color", COLORS, THINGS)
        told = Turn(f"My {thing} is {color}.", f"A {color} {thing}, I see.")
        return Fact(thing, told, Turn(f"What color is my {thing}?", f"Your {thing} is {color}."))

    def number(self) -> Fact:
        (number,) = self.draw("number", range(100))
        told = Turn(f"Remember the number {number}.", f"I will remember {number}.")
        return Fact("number", told, Turn("Which number did I say?", f"You said {number}."))

    def word(self) -> Fact:
        tell, word = self.draw("word", ("Remember the word {}.", "The secret word is {}."), WORDS)
        told = Turn(tell.format(word), f"I will remember {word}.")
        return Fact("word", told, Turn("Which word did I say?", f"The word is {word}."))

    def city(self) -> Fact:
        tell, city = self.draw("city", ("I live in {}.", "My home is in {}."), tuple(CAPITALS.values()))
        told = Turn(tell.format(city), f"{city} is a nice city.")
        return Fact("city", told, Turn("Where do I live?", f"You live in {city}."))

    def favorite(self) -> Fact:
        pairs = [(kind, one) for kind, many in FAVORITES.items() for one in many]
        ((kind, favorite),) = self.draw("favorite", pairs)
        told = Turn(f"My favorite {kind} is {favorite}.", f"I like {favorite} too.")
        return Fact(kind, told, Turn(f"What is my favorite {kind}?", f"Your favorite {kind} is {favorite}."))

    # Whole dialogues.

    def question(self) -> Turn:
        """A turn that needs no memory."""
        (kind,) = self.rng.choices(tuple(SHARES), tuple(SHARES.values()))
        return self.questions[kind]()

    def fact(self) -> Fact:
        """A fact of any kind."""
        return self.facts[self.rng.choice(tuple(self.facts))]()

    def turns(self) -> list[Turn]:
        """One to twelve turns; of each topic one fact at most, which may be asked back many times."""
        turns: list[Turn] = []
        told: dict[str, Fact] = {}
        for _ in range(self.rng.choice((1, 2, 3, 3, 3, 4, 4, 5, 6, 8, 12))):
            if told and self.rng.random() < 0.5:
                turns.append(self.rng.choice(tuple(told.values())).asked)
            elif self.rng.random() < 0.45 and (fact := self.fact()).topic not in told:
                told[fact.topic] = fact
                turns.append(fact.told)
            else:
                turns.append(self.question())
        return turns

    def system(self) -> str | None:
        """Mostly the default system text, at times another, at times none."""
        other = self.rng.choice((*OTHER_SYSTEMS, None))
        return DEFAULT_SYSTEM if self.rng.random() < 0.85 else other

    def recall(self, kind: str, between: int) -> tuple[list[Turn], Turn]:
        """A fact told, `between` unrelated turns, and the question that asks it back."""
        fact = self.facts[kind]()
        return [fact.told, *(self.question() for _ in range(between))], fact.asked


def chat(turns: Sequence[Turn], ask: str) -> list[dict[str, str]]:
    """The messages of a chat that ends with the user asking."""
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    return [*messages, {"role": "user", "content": ask}]


def held_out_items(seed: int = 1) -> list[dict[str, Any]]:
    """The 40 held-out items, all different: 28 single questions and 12 recalls across three turns."""
    speaker = Speaker(seed, held_out=True)
    counts = {"plus": 5, "minus": 2, "count": 2, "capital": 4, "spell": 4, "repeat": 6, "greet": 2, "code": 3}
    cases: dict[str, tuple[list[Turn], Turn]] = {}  # by the first thing the user says
    for kind, count in counts.items():
        wanted = len(cases) + count
        while len(cases) < wanted:
            turn = speaker.questions[kind]()
            cases.setdefault(turn.user, ([], turn))
    for kind in speaker.facts:
        wanted = len(cases) + 2
        while len(cases) < wanted:
            turns, asked = speaker.recall(kind, between=1)
            cases.setdefault(turns[0].user, (turns, asked))
    return [{"messages": chat(turns, last.user), "answer": last.assistant} for turns, last in cases.values()]
