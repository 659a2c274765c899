"""Makes copying tasks: repeat a text of any kind exactly."""

from random import Random

from demo_model.corpus import words
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.split import Phrasings, Split, draw

FAMILY = "copying"
_QUOTES = ("{text}", "{text}", '"{text}"', "'{text}'", "`{text}`")

_REPEAT = Phrasings(
    "copying/repeat",
    (
        "Repeat after me: {text}", "Repeat this: {text}", "Say {text}", "Say this: {text}", "Copy this text: {text}",
        "Repeat exactly: {text}", "Repeat the following text.\n{text}", "Write this down: {text}",
        "Please repeat: {text}", "Echo {text}", "Can you repeat this for me? {text}", "Repeat the following: {text}",
        "Copy: {text}", "Say exactly this and nothing else: {text}", "I want you to repeat this: {text}",
        "Print {text}", "Reply with this text only: {text}", "Give me this back unchanged: {text}",
        "Answer with exactly: {text}", "Say after me: {text}", "Say the following: {text}", "Write this: {text}",
        "Write the following text: {text}", "Write exactly this: {text}", "Copy the following: {text}",
        "Copy this exactly: {text}", "Please copy this: {text}", "Please say this: {text}",
        "Can you say this? {text}", "Can you copy this text for me? {text}", "Repeat this text unchanged: {text}",
        "Give this back to me: {text}", "Return this text unchanged: {text}", "Return {text}", "Print this: {text}",
        "Print the following.\n{text}", "Echo this: {text}", "Echo the text: {text}", "Type {text}",
        "Type this: {text}", "Answer with this text only: {text}", "Reply with exactly this: {text}",
        "Just say {text}", "Only repeat this: {text}", "Now say: {text}", "Your answer shall be: {text}",
        "Repeat: {text}", "Return the following unchanged: {text}", "Give me this text unchanged: {text}",
        "Return exactly this text: {text}", "Echo the following text: {text}", "Echo exactly: {text}",
        "Answer with this: {text}", "Answer with the text {text}", "Reply with the following: {text}",
    ),
    num_held_out=4,
    num_common=10,
)  # fmt: skip
_TIMES = Phrasings(
    "copying/times",
    (
        "Repeat the word {text} {count} times.", "Say {text} {count} times.", "Write {text} {count} times.",
        "Print {text} {count} times.", "Please say {text} {count} times.", "Can you write {text} {count} times?",
        "Give me {text} {count} times.", "Echo {text} {count} times.", "Repeat {text} {count} times.",
        "Please repeat {text} {count} times.", "Print the word {text} {count} times.",
        "Echo the word {text} {count} times.", "Say the word {text} {count} times.",
        "Write the word {text} {count} times, please.", "Now say {text} {count} times.",
        "Could you say {text} {count} times?", "Please echo {text} {count} times.", "Type {text} {count} times.",
        "I want to read {text} {count} times.", "{count} times {text}, please.",
        "Please print {text} {count} times.", "Can you repeat {text} {count} times?",
        "Could you write {text} {count} times?", "Could you repeat {text} {count} times?",
        "Could you echo {text} {count} times?", "Could you print {text} {count} times, please?",
        "{count} times the word {text}, please.", "{count} times {text}.", "Please {count} times {text}.",
        "Please say the word {text} {count} times.", "I want you to say {text} {count} times.",
        "Would you say {text} {count} times?", "{text}, {count} times, please.", "{text} {count} times, please.",
        "Say {count} times {text}.", "Write {count} times {text}.", "Please write {count} times {text}.",
        "Can you say {count} times {text}?", "Could you echo the word {text} {count} times?",
        "Please echo the word {text} {count} times.", "{count} times {text}, thank you.",
        "{count} times {text} and no more.", "I want {count} times {text}.", "Give me {count} times {text}, please.",
        "{count} times: {text}", "Could you echo {text} {count} times, please?",
    ),
)  # fmt: skip
_COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5, "2": 2, "3": 3, "4": 4, "5": 5}


def _some_words(random: Random) -> str:
    return " ".join(words.word(random) for _ in range(random.randint(1, 10)))


def _sentence(random: Random) -> str:
    subject = f"the {random.choice(words.ADJECTIVES)} {random.choice(words.ANIMALS)}"
    text = f"{subject} {random.choice(words.VERBS)} near the {random.choice(words.PLACES)}"
    if random.random() < 0.4:
        text += f" and the {random.choice(words.THINGS)} is {random.choice(words.COLOURS)}"
    return text[0].upper() + text[1:] + random.choice((".", ".", "!", "?"))


def _sentences(random: Random) -> str:
    return " ".join(_sentence(random) for _ in range(random.randint(2, 4)))


def _codes(random: Random) -> str:
    return " ".join(words.code(random) for _ in range(random.randint(1, 4)))


def _numbers(random: Random) -> str:
    return " ".join(str(random.randint(0, 9999)) for _ in range(random.randint(1, 6)))


def _made_up(random: Random) -> str:
    return " ".join(words.made_up_word(random) for _ in range(random.randint(1, 6)))


def _foreign(random: Random) -> str:
    pieces = [random.choice((words.word(random), random.choice(words.ACCENTED))) for _ in range(random.randint(1, 4))]
    pieces.append(random.choice(words.SYMBOLS))
    random.shuffle(pieces)
    return " ".join(pieces)


def _lines(random: Random) -> str:
    return "\n".join(
        _sentence(random) if random.random() < 0.5 else _some_words(random) for _ in range(random.randint(2, 4))
    )


def _names(random: Random) -> str:
    return ", ".join(words.name(random) for _ in range(random.randint(2, 6)))


def _letters(random: Random) -> str:
    return "".join(random.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(random.randint(3, 9)))


_TEXTS = (
    _some_words,
    _some_words,
    _sentence,
    _sentence,
    _sentences,
    _codes,
    _numbers,
    _made_up,
    _foreign,
    _lines,
    _names,
    _letters,
)


def text_to_copy(random: Random) -> str:
    """Make a text of any kind: words, sentences, codes, numbers, nonsense, letters with accents, several lines."""
    return random.choice(_TEXTS)(random)


def _times(random: Random, split: Split) -> Sample:
    phrasing = _TIMES.choose(random, split)
    text = draw(random, split, words.word)
    said = random.choice(tuple(_COUNTS))
    answer = " ".join([text] * _COUNTS[said])
    return Sample(FAMILY, phrasing.name, text, exchange(phrasing.text.format(text=text, count=said), answer))


def copying(random: Random, split: Split) -> Sample:
    """Ask for a text to be repeated, quoted or not; quotes are not part of it."""
    if random.random() < 0.25:
        return _times(random, split)
    phrasing = _REPEAT.choose(random, split)
    text = draw(random, split, text_to_copy)
    quoted = random.choice(_QUOTES).format(text=text)
    return Sample(FAMILY, phrasing.name, text, exchange(phrasing.text.format(text=quoted), text))
