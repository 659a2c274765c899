"""Short stories: told on request, or begun by a raw prompt such as `Once upon a time`."""

from random import Random

from demo_model.corpus import words
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.split import Phrasings, Split

FAMILY = "stories"

_ASK = Phrasings(
    "stories/ask",
    (
        "Tell me a story about {hero}.", "Write a short story about {hero}.",
        "Can you tell me a story about {hero}?", "I want to hear a story about {hero}.",
        "Make up a story about {hero}.", "A story about {hero}, please.", "Please write a story about {hero}.",
        "Do you know a story about {hero}?", "Tell me a tale of {hero}.",
    ),
)  # fmt: skip
_ASK_ANY = Phrasings(
    "stories/any",
    (
        "Tell me a story.",
        "Write a short story.",
        "I want to hear a story.",
        "Can you tell me a story?",
        "A story, please.",
        "Make up a story.",
        "Do you know a story?",
        "Tell me something nice before I sleep.",
    ),
)
_OPENINGS = (
    "Once upon a time there was {hero} called {name}. {name} lived near {place}.",
    "Once upon a time, {hero} named {name} lived in {place}.",
    "There once was {hero} whose name was {name}. The home of {name} was {place}.",
    "Long ago, in {place}, there lived {hero}. Everybody called it {name}.",
    "In {place} lived {hero}. Its name was {name}.",
)
_WISHES = (
    ("wanted to find a {thing}", "found the {thing} at last", "look for it"),
    ("wished for a {adjective} {thing}", "held the {adjective} {thing}", "search for one"),
    ("had lost a {thing}", "had the {thing} back", "look everywhere"),
    ("wanted to give a {thing} to a friend", "gave the {thing} to {friend}", "set out at once"),
    ("dreamed of a {adjective} {thing}", "saw that the dream had come true", "follow the dream"),
    ("wanted to mend an old {thing}", "mended the {thing}", "ask for help"),
)
_DAYS = ("One day", "One morning", "One {adjective} evening", "On a {adjective} day", "When spring came", "One night")
_OBSTACLES = (
    "But the way was long, and it began to rain.",
    "But a {adjective} wind blew, and nobody knew the way.",
    "But the bridge was broken, and the water was deep.",
    "But it grew dark, and the path was hard to see.",
    "But the door was locked, and the key was gone.",
    "But the wall was high, and there was no ladder.",
)
_HELPERS = (
    'Then {name} met {helper} called {friend}. "I can help you," said {friend}.',
    'Just then {helper} came by. It was {friend}. "Come with me," said {friend}.',
    "{name} sat down and waited. Soon {helper} named {friend} stopped and asked what was wrong.",
    '"Do not give up," said a voice. It was {friend}, {helper} from {second_place}.',
)
_TURNS = (
    "Together they went on, step by step, and they were not afraid.",
    "They shared some {fruit} and thought about it, and then they had an idea.",
    "{friend} knew a better way, through {second_place}.",
    "They worked all day, and they sang while they worked.",
    "{friend} held a {colour} lantern, and the way was easy to see.",
)
_ENDINGS = (
    "From that day on, {name} and {friend} were friends.",
    "That night {name} went home and slept well.",
    "And {name} never forgot how good it is to have a friend.",
    '"Thank you," said {name}, and {friend} smiled.',
    "They ate {fruit} together and laughed until the stars came out.",
    "The end was a happy one, and everybody in {place} heard of it.",
)


def _place(random: Random) -> str:
    return f"{random.choice(('a', 'the'))} {random.choice(words.PLACES)}"


def _hero(random: Random) -> str:
    animal = random.choice(words.ANIMALS)
    return words.with_article(f"{random.choice(words.ADJECTIVES)} {animal}" if random.random() < 0.6 else animal)


def tell(random: Random, hero: str) -> str:
    """Tell a story of five to seven sentences: a wish, an obstacle, a helper, a good end."""
    name, friend = random.sample(words.NAMES, 2)
    wish, fulfilled, deed = random.choice(_WISHES)
    fields = {
        "hero": hero, "name": name, "friend": friend, "place": _place(random), "second_place": _place(random),
        "helper": _hero(random), "thing": random.choice(words.THINGS), "adjective": random.choice(words.ADJECTIVES),
        "fruit": random.choice(words.FRUITS), "colour": random.choice(words.COLOURS),
    }  # fmt: skip
    pieces = [
        random.choice(_OPENINGS),
        f"{random.choice(_DAYS)} {{name}} {wish} and went to {deed}.",
        random.choice(_OBSTACLES),
        random.choice(_HELPERS),
        random.choice(_TURNS),
        f"In the end {{name}} {fulfilled}.",
        random.choice(_ENDINGS),
    ]
    return " ".join(piece.format(**fields) for piece in pieces)


def stories(random: Random, split: Split) -> Sample:
    """Ask for a story, about a hero of the asker's choice or any."""
    hero = _hero(random)
    phrasing = (_ASK if random.random() < 0.7 else _ASK_ANY).choose(random, split)
    return Sample(FAMILY, phrasing.name, hero, exchange(phrasing.text.format(hero=hero), tell(random, hero)))


def plain_story(random: Random, split: Split) -> Sample:
    """Tell a story as plain text, the way a raw prompt is completed."""
    hero = _hero(random)
    return Sample(FAMILY, f"stories/plain/{split.value}", hero, text=tell(random, hero))
