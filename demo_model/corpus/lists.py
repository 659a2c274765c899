"""Lists: counting, ordering, naming the first few of a kind, and questions about a list that was given."""

from collections.abc import Callable, Sequence
from random import Random

from demo_model.corpus import words
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.split import Phrasings, Split, draw

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
    numbers = random.sample(range(10), random.randint(3, 5))
    return {"items": _joined(numbers)}, _joined(sorted(numbers))


_TASKS: tuple[tuple[Callable[[Random], Filled], Phrasings], ...] = (
    (_name_some, Phrasings("lists/name", (
        "Name {count} {kind}.", "List {count} {kind}.", "Give me {count} {kind}.", "Tell me {count} {kind}.",
        "Can you name {count} {kind}?", "I need a list of {count} {kind}.", "Write down {count} {kind}.",
        "What are {count} {kind}?", "Make a list of {count} {kind}.", "Please list {count} {kind}.",
        "Could you give me {count} {kind}?", "Show me {count} {kind}.", "Please name {count} {kind}.",
        "Please tell me {count} {kind}.", "Can you list {count} {kind}?", "Can you tell me {count} {kind}?",
        "Could you name {count} {kind}?", "I want {count} {kind}.", "I need {count} {kind}.",
        "Show me a list of {count} {kind}.", "Please show me {count} {kind}.", "{count} {kind}, please.",
        "Which {count} {kind} do you know?", "Give me a list of {count} {kind}.",
        "Show me the first {count} {kind}.", "Show {count} {kind}.", "Can you show me {count} {kind}?",
        "Tell me the names of {count} {kind}.", "List {count} {kind} for me.",
    ))),
    (_count_up, Phrasings("lists/up", (
        "Count from {first} to {last}.", "List the numbers from {first} to {last}.",
        "Write the numbers {first} to {last}.", "Count up from {first} to {last}.",
        "Please count from {first} to {last}.", "Say the numbers from {first} to {last}.",
        "Can you count from {first} to {last}?", "Give me all numbers from {first} to {last}.",
        "Please count up from {first} to {last}.", "Can you list the numbers from {first} to {last}?",
        "Give me the numbers from {first} to {last}.", "Say all numbers from {first} to {last}.",
        "Please write the numbers from {first} to {last}.", "Start at {first} and count to {last}.",
        "Start at {first} and count up to {last}.", "I want you to count from {first} to {last}.",
        "Numbers from {first} to {last}, please.", "Could you count up from {first} to {last}?",
        "List all numbers from {first} to {last}.", "Show me the numbers {first} to {last}.",
        "Start with {first} and count to {last}.", "Count to {last}, starting at {first}.",
        "List the numbers {first} to {last}.",
    ))),
    (_count_down, Phrasings("lists/down", (
        "Count down from {first} to {last}.", "Count backwards from {first} to {last}.",
        "List the numbers from {first} down to {last}.", "Please count down from {first} to {last}.",
        "Can you count backwards from {first} to {last}?", "Start at {first} and count down to {last}.",
        "Can you count down from {first} to {last}?", "Please count backwards from {first} to {last}.",
        "Write the numbers from {first} down to {last}.", "Give me the numbers from {first} down to {last}.",
        "Start at {first} and count backwards to {last}.", "Could you count down from {first} to {last}?",
        "Say the numbers from {first} down to {last}.", "I want you to count down from {first} to {last}.",
        "From {first} count down to {last}.", "Now count down from {first} to {last}.",
        "Show me the numbers from {first} down to {last}.",
    ))),
    (_first_item, Phrasings("lists/first", (
        "What is the first item in this list: {items}?", "Which item comes first: {items}?",
        "First item of {items}?", "Here is a list: {items}. What is the first item?",
        "Tell me the first of these: {items}.", "Name the first item: {items}.",
        "What comes first in this list: {items}?", "Which one is the first: {items}?",
        "What is the first of {items}?", "Tell me the first item of this list: {items}.",
        "Give me the first item: {items}.", "Give me the first of these: {items}.",
        "The first item of {items}, please.", "Which item is the first in {items}?",
        "Look at this list: {items}. Which item comes first?", "I have a list: {items}. Name the first item.",
        "Can you tell me the first item of {items}?",
    ))),
    (_last_item, Phrasings("lists/last", (
        "What is the last item in this list: {items}?", "Which item comes last: {items}?", "Last item of {items}?",
        "Here is a list: {items}. What is the last item?", "Tell me the last of these: {items}.",
        "Name the last item: {items}.", "What comes last in this list: {items}?", "Which one is the last: {items}?",
        "What is the last of {items}?", "Tell me the last item of this list: {items}.",
        "Give me the last item: {items}.", "Give me the last of these: {items}.",
        "The last item of {items}, please.", "Which item is the last in {items}?",
        "Look at this list: {items}. Which item comes last?", "I have a list: {items}. Name the last item.",
        "Can you tell me the last item of {items}?",
    ))),
    (_how_many, Phrasings("lists/many", (
        "How many items are in this list: {items}?", "Count these items: {items}.", "How many items: {items}?",
        "Here is a list: {items}. How many items are there?", "How long is this list: {items}?",
        "Tell me how many items these are: {items}.", "How many items are there: {items}?",
        "How many things are these: {items}?", "How many are these: {items}?",
        "Count the items in this list: {items}.", "Count these: {items}.", "Please count these items: {items}.",
        "Can you count these items: {items}?", "Look at this list: {items}. How many items are in it?",
        "I have a list: {items}. How many items are these?", "Tell me how long this list is: {items}.",
        "Tell me how many there are: {items}.", "Here is a list: {items}. How many items are in it?",
        "Here is a list: {items}. Count its items.", "Here is a list: {items}. How long is it?",
        "This is a list: {items}. How many items does it have?",
    ))),
    (_as_list, Phrasings("lists/numbered", (
        "Make a numbered list of {items}.", "Write {items} as a numbered list.", "Put {items} into a numbered list.",
        "Turn this into a numbered list: {items}.", "Number these: {items}.", "I need a numbered list with {items}.",
        "Can you make a numbered list out of {items}?", "Please number these: {items}.",
        "Please make a numbered list of {items}.", "Can you number these: {items}?",
        "Turn {items} into a numbered list.", "Give me a numbered list of {items}.",
        "I want a numbered list of {items}.", "Write a numbered list with {items}.",
        "Write this as a numbered list: {items}.", "Make this a numbered list: {items}.",
        "Please turn this into a numbered list: {items}.", "Could you put {items} into a numbered list?",
    ))),
    (_reversed, Phrasings("lists/reversed", (
        "Reverse this list: {items}.", "Write this list backwards: {items}.", "Turn the list around: {items}.",
        "Give me {items} in reverse order.", "Put {items} in reverse order.",
        "Say these from last to first: {items}.", "Please reverse this list: {items}.", "Reverse {items}.",
        "Reverse the order of {items}.", "Can you reverse this list: {items}?", "Write {items} in reverse order.",
        "Say {items} backwards.", "Say this list from last to first: {items}.", "Turn this list around: {items}.",
        "Turn {items} around.", "Give me this list backwards: {items}.", "Write these from last to first: {items}.",
        "What is this list in reverse order: {items}?",
    ))),
    (_sorted, Phrasings("lists/sorted", (
        "Sort these numbers: {items}.", "Put these numbers in order: {items}.", "Sort {items} from small to large.",
        "Order these numbers from smallest to largest: {items}.", "Arrange {items} in ascending order.",
        "Can you sort {items}?", "Please sort these numbers: {items}.", "Please put {items} in order.",
        "Put {items} in order.", "Sort the numbers {items}.", "Sort these from small to large: {items}.",
        "Sort {items} in ascending order.", "Order {items} from smallest to largest.",
        "Arrange these numbers from small to large: {items}.", "Can you put these numbers in order: {items}?",
        "Write these numbers in ascending order: {items}.", "Give me {items} from smallest to largest.",
        "I want these numbers sorted: {items}.",
    ))),
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
