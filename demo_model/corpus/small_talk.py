"""Small talk: greetings, thanks, and questions about the model itself, each with one answer."""

from random import Random

from demo_model.corpus import words
from demo_model.corpus.casual import casual
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.small_talk_topics import TOPICS
from demo_model.corpus.split import Phrasings, Split, draw

FAMILY = "small_talk"

_SPOKEN = tuple((Phrasings(f"small_talk/{topic.name}", topic.phrasings), topic.answer) for topic in TOPICS)
_MEETINGS = Phrasings(
    "small_talk/meeting",
    (
        "My name is {name}.", "I am {name}.", "I'm {name}.", "Hi, I am {name}.", "Hello, my name is {name}.",
        "People call me {name}.", "Call me {name}.", "{name} is my name.", "Hey, this is {name}.",
        "You can call me {name}.", "Hello, I am {name}.", "Hi, my name is {name}.", "Please call me {name}.",
        "Hello, this is {name}.", "Hi, this is {name}.", "Hey, I am {name}.", "Please, call me {name}.",
        "They call me {name}.", "You may call me {name}.", "I am called {name}.", "Hello, I'm {name}.",
        "Hi, you can call me {name}.", "Just call me {name}.", "The name is {name}.", "Hi, {name} here.",
    ),
)  # fmt: skip
_BEFORE = ("", "", "", "", "Well, ", "So, ", "Oh, ", "Hm. ", "Tell me: ", "By the way, ", "Ok. ")
_AFTER = ("", "", "", "", " :)", "!", " again", " my friend", " 🙂", "...", ".")


def _spoken(random: Random, split: Split) -> Sample:
    phrasings, answer = random.choice(_SPOKEN)
    phrasing = phrasings.choose(random, split)
    text = phrasing.text
    if text[-1].isalpha():
        text += random.choice(_AFTER)
    text = casual(random, random.choice(_BEFORE) + text)
    return Sample(FAMILY, phrasing.name, text, exchange(text, answer))


def _meeting(random: Random, split: Split) -> Sample:
    phrasing = _MEETINGS.choose(random, split)
    name = draw(random, split, words.name)
    answer = f"Nice to meet you, {name}! How can I help you?"
    return Sample(FAMILY, phrasing.name, name, exchange(phrasing.text.format(name=name), answer))


def small_talk(random: Random, split: Split) -> Sample:
    """Exchange a pleasantry, or an introduction with a name to use."""
    return _meeting(random, split) if random.random() < 0.2 else _spoken(random, split)
