"""Lists: counting, ordering, naming the first few of a kind, and questions about a list that was given."""

from collections.abc import Callable, Sequence
from random import Random

from engine.demo.corpus import words
from engine.demo.corpus.sample import Sample, exchange
from engine.demo.corpus.split import Phrasings, Split, draw

FAMILY = "lists"
Filled = tuple[dict[str, str], str]
"""The fields of a question and its answer."""

_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_KINDS: dict[str, Sequence[str]] = {
    "fruits": ("apples", "pears", "plums", "cherries", "grapes", "lemons", "oranges", "bananas"),
    "animals": ("fox", "owl", "bear", "hare", "mouse", "otter", "heron", "badger"),
    "colours": ("red", "blue", "green", "yellow", "orange", "purple", "brown", "black"),
    "cities": ("Oslo", "Lisbon", "Vienna", "Cairo", "Lima", "Tokyo", "Seoul", "Rome"),
    "tools": ("hammer", "saw", "drill", "ladder", "rope", "brush", "knife", "file"),
    "vegetables": ("carrots", "peas", "beans", "onions", "leeks", "potatoes", "cabbage", "spinach"),
    "instruments": ("piano", "violin", "flute", "drum", "guitar", "harp", "trumpet", "organ"),
    "birds": ("robin", "raven", "sparrow", "eagle", "swan", "heron", "falcon", "crow"),
    "Tandem services": ("the control plane", "prefill", "decode", "KV transfer"),
    "tandem commands": ("tandem up", "tandem run", "tandem status", "tandem chat"),
    "weekdays": words.WEEKDAYS,
    "months": words.MONTHS,
    "planets": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "latency measures": ("TTFT", "ITL", "TPOT", "the hand-over gap"),
}


def _numbered(items: Sequence[str]) -> str:
    return "\n".join(f"{number}. {item}" for number, item in enumerate(items, start=1))


def _joined(items: Sequence[object]) -> str:
    return ", ".join(str(item) for item in items)


def _name_some(random: Random) -> Filled:
    kind, items = random.choice(list(_KINDS.items()))
    count = random.randint(2, min(len(items), 8))
    said = random.choice((str(count), _NUMBER_WORDS[count]))
    return {"count": said, "kind": kind}, _numbered(items[:count])


def _count_up(random: Random) -> Filled:
    first = random.randint(0, 60)
    last = first + random.randint(3, 12)
    return {"first": str(first), "last": str(last)}, _joined(range(first, last + 1))


def _count_down(random: Random) -> Filled:
    last = random.randint(0, 40)
    first = last + random.randint(3, 10)
    return {"first": str(first), "last": str(last)}, _joined(range(first, last - 1, -1))


def _words(random: Random, fewest: int = 3, most: int = 6) -> list[str]:
    kind = random.choice((words.COLOURS, words.ANIMALS, words.FRUITS, words.THINGS, words.PLACES, words.NAMES))
    return random.sample(kind, random.randint(fewest, most))


def _first_item(random: Random) -> Filled:
    items = _words(random)
    return {"items": _joined(items)}, f"The first item is {items[0]}."


def _last_item(random: Random) -> Filled:
    items = _words(random)
    return {"items": _joined(items)}, f"The last item is {items[-1]}."


def _how_many(random: Random) -> Filled:
    items = _words(random, 2, 7)
    return {"items": _joined(items)}, f"There are {len(items)} items."


def _as_list(random: Random) -> Filled:
    items = _words(random)
    return {"items": f"{', '.join(items[:-1])} and {items[-1]}"}, _numbered(items)


def _reversed(random: Random) -> Filled:
    items = _words(random, 3, 5)
    return {"items": _joined(items)}, _joined(items[::-1])


def _sorted(random: Random) -> Filled:
    numbers = random.sample(range(100), random.randint(3, 5))
    return {"items": _joined(numbers)}, _joined(sorted(numbers))


_TASKS: tuple[tuple[Callable[[Random], Filled], Phrasings], ...] = (
    (_name_some, Phrasings("lists/name", (
        "Name {count} {kind}.", "List {count} {kind}.", "Give me {count} {kind}.", "Tell me {count} {kind}.",
        "Can you name {count} {kind}?", "I need a list of {count} {kind}.", "Write down {count} {kind}.",
        "What are {count} {kind}?", "Make a list of {count} {kind}.", "Please list {count} {kind}.",
        "Could you give me {count} {kind}?", "Show me {count} {kind}."))),
    (_count_up, Phrasings("lists/up", (
        "Count from {first} to {last}.", "List the numbers from {first} to {last}.",
        "Write the numbers {first} to {last}.",
        "Count up from {first} to {last}.", "Please count from {first} to {last}.",
        "Say the numbers from {first} to {last}.",
        "Can you count from {first} to {last}?", "Give me all numbers from {first} to {last}."))),
    (_count_down, Phrasings("lists/down", (
        "Count down from {first} to {last}.", "Count backwards from {first} to {last}.",
        "List the numbers from {first} down to {last}.", "Please count down from {first} to {last}.",
        "Can you count backwards from {first} to {last}?", "Start at {first} and count down to {last}."))),
    (_first_item, Phrasings("lists/first", (
        "What is the first item in this list: {items}?", "Which item comes first: {items}?", "First item of {items}?",
        "Here is a list: {items}. What is the first item?", "Tell me the first of these: {items}.",
        "Name the first item: {items}."))),
    (_last_item, Phrasings("lists/last", (
        "What is the last item in this list: {items}?", "Which item comes last: {items}?", "Last item of {items}?",
        "Here is a list: {items}. What is the last item?", "Tell me the last of these: {items}.",
        "Name the last item: {items}."))),
    (_how_many, Phrasings("lists/many", (
        "How many items are in this list: {items}?", "Count these items: {items}.", "How many items: {items}?",
        "Here is a list: {items}. How many items are there?", "How long is this list: {items}?",
        "Tell me how many items these are: {items}."))),
    (_as_list, Phrasings("lists/numbered", (
        "Make a numbered list of {items}.", "Write {items} as a numbered list.", "Put {items} into a numbered list.",
        "Turn this into a numbered list: {items}.", "Number these: {items}.", "I need a numbered list with {items}.",
        "Can you make a numbered list out of {items}?"))),
    (_reversed, Phrasings("lists/reversed", (
        "Reverse this list: {items}.", "Write this list backwards: {items}.", "Turn the list around: {items}.",
        "Give me {items} in reverse order.", "Put {items} in reverse order.",
        "Say these from last to first: {items}."))),
    (_sorted, Phrasings("lists/sorted", (
        "Sort these numbers: {items}.", "Put these numbers in order: {items}.", "Sort {items} from small to large.",
        "Order these numbers from smallest to largest: {items}.", "Arrange {items} in ascending order.",
        "Can you sort {items}?"))),
)  # fmt: skip


def lists(random: Random, split: Split) -> Sample:
    """Ask for a list, or about one."""
    fill, phrasings = random.choice(_TASKS)
    phrasing = phrasings.choose(random, split)
    if fill is _name_some:
        fields, answer = fill(random)
    else:
        fields, answer = draw(random, split, fill, lambda filled: str(sorted(filled[0].items())))
    question = phrasing.text.format(**fields)
    return Sample(FAMILY, phrasing.name, str(sorted(fields.items())), exchange(question, answer))
