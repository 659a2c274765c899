"""Makes JSON tasks: read a sentence, write the object with the requested keys in the requested order."""

import json
from collections.abc import Callable
from random import Random

from demo_model.corpus import words
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.split import Phrasings, Split, draw

FAMILY = "json"
Fields = dict[str, str | int]

_ASK = Phrasings(
    "json/ask",
    (
        "Turn this into JSON with the keys {keys}: {sentence}", "Extract {keys} as JSON: {sentence}",
        "Write JSON with {keys} from this sentence: {sentence}",
        "{sentence} Give me that as JSON with the keys {keys}.", "Fill a JSON object with {keys}. {sentence}",
        "Read this and answer in JSON with {keys}: {sentence}",
        "Make a JSON object with the keys {keys} out of this: {sentence}", "{sentence}\nReturn JSON with {keys}.",
        "I need JSON with the keys {keys}. Text: {sentence}", "Convert to JSON ({keys}): {sentence}",
        "Text: {sentence}\nKeys: {keys}\nAnswer with JSON only.", "From the text, get {keys} as JSON.\n{sentence}",
        "Please extract {keys} from this text as JSON: {sentence}", "JSON with {keys}, please: {sentence}",
        "Read this and give me JSON with {keys}: {sentence}", "Read the text and write JSON with {keys}. {sentence}",
        "Please turn this into JSON with {keys}: {sentence}",
        "Please make JSON with the keys {keys} from this: {sentence}", "I need {keys} as JSON. {sentence}",
        "I want JSON with {keys}: {sentence}", "Give me JSON with the keys {keys}. Text: {sentence}",
        "Answer in JSON with the keys {keys}: {sentence}", "Answer with JSON ({keys}): {sentence}",
        "What are {keys}? Answer in JSON. {sentence}", "Can you extract {keys} as JSON? {sentence}",
        "Get {keys} from this text as JSON: {sentence}", "Here is a text: {sentence} Write JSON with {keys}.",
        "{sentence} Please extract {keys} as JSON.", "{sentence}\nMake JSON with the keys {keys}.",
        "JSON with the keys {keys}: {sentence}", "Answer in JSON with {keys}: {sentence}",
        "Answer in JSON with {keys}. {sentence}", "Read this and write JSON with {keys}: {sentence}",
        "Read this and make JSON with {keys}. {sentence}", "Read this text and extract {keys} as JSON: {sentence}",
        "Read the text, then answer in JSON with {keys}: {sentence}",
        "Please make JSON with {keys} out of this: {sentence}", "Please write JSON with the keys {keys}: {sentence}",
        "Please give me JSON with the keys {keys} for this: {sentence}", "I need JSON with {keys}. Text: {sentence}",
        "I need JSON with the keys {keys} from this text: {sentence}", "Make JSON with {keys}: {sentence}",
    ),
    num_held_out=3,
)  # fmt: skip
_SENTENCES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("person", ("{name} is {age} years old and lives in {city}.", "{name}, {age}, lives in {city}.",
                "In {city} lives {name}, who is {age}.", "{name} from {city} is {age} years old.",
                "My neighbour {name} is {age} and was born in {city}.", "{name} moved to {city} at the age of {age}.")),
    ("order", ("{name} ordered {quantity} {item} on {day}.", "On {day} {name} bought {quantity} {item}.",
               "{quantity} {item} were sold to {name} on {day}.", "{name} wants {quantity} {item} by {day}.",
               "Please send {quantity} {item} to {name} on {day}.")),
    ("meeting", ("{name} meets {guest} on {day} at {hour} o'clock.", "On {day} at {hour} o'clock {name} sees {guest}.",
                 "{name} and {guest} have a meeting on {day} at {hour}.",
                 "The meeting of {name} with {guest} is on {day} at {hour}.")),
    ("pet", ("{name} has a {colour} {animal} called {pet}.", "The {colour} {animal} of {name} is called {pet}.",
             "{pet} is a {colour} {animal} and belongs to {name}.", "{name} owns {pet}, a {colour} {animal}.")),
    ("ticket", ("Ticket {code}: {name} reports a broken {thing} in {city}.",
    "In {city} a {thing} broke; {name} opened ticket {code}.",
                "{name} in {city} has a problem with a {thing}, ticket {code}.")),
    ("worker", ("Worker {worker} runs {requests} requests and has {free_blocks} free blocks.",
                "{worker} has {free_blocks} free blocks and {requests} requests.",
                "There are {requests} requests on {worker}, with {free_blocks} blocks free.")),
)  # fmt: skip
_MAKERS: dict[str, Callable[[Random], str | int]] = {
    "name": words.name,
    "guest": words.name,
    "pet": words.name,
    "city": words.city,
    "age": lambda random: random.randint(1, 99),
    "quantity": lambda random: random.randint(2, 60),
    "hour": lambda random: random.randint(7, 20),
    "item": lambda random: random.choice(words.FRUITS),
    "thing": lambda random: random.choice(words.THINGS),
    "animal": lambda random: random.choice(words.ANIMALS),
    "colour": lambda random: random.choice(words.COLOURS),
    "day": lambda random: random.choice(words.WEEKDAYS),
    "code": lambda random: f"{random.choice('ABCDEFGH')}{random.randint(100, 9999)}",
    "worker": lambda random: f"{random.choice(('prefill', 'decode', 'kv', 'node'))}-{random.randint(0, 99)}",
    "requests": lambda random: random.randint(0, 64),
    "free_blocks": lambda random: random.randint(0, 999),
}


def _list_of_keys(random: Random, keys: list[str]) -> str:
    shown = [f'"{key}"' for key in keys] if random.random() < 0.2 else keys
    if len(shown) == 1 or random.random() < 0.3:
        return ", ".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _fill(random: Random, sentences: tuple[str, ...]) -> tuple[str, Fields]:
    sentence = random.choice(sentences)
    fields = {key: make(random) for key, make in _MAKERS.items() if f"{{{key}}}" in sentence}
    return sentence.format(**fields), fields


def json_filling(random: Random, split: Split) -> Sample:
    """Ask for a JSON object from a sentence: some or all of its fields, in an order of the asker's choice."""
    phrasing = _ASK.choose(random, split)
    _, sentences = random.choice(_SENTENCES)
    sentence, fields = draw(random, split, lambda rng: _fill(rng, sentences), lambda filled: filled[0])
    keys = random.sample(sorted(fields), random.randint(min(2, len(fields)), len(fields)))
    answer = json.dumps({key: fields[key] for key in keys}, ensure_ascii=False)
    question = phrasing.text.format(keys=_list_of_keys(random, keys), sentence=sentence)
    return Sample(FAMILY, phrasing.name, sentence, exchange(question, answer))
