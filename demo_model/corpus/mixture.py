"""The training stream: document number n of a seed is always the same text."""

from collections.abc import Callable, Iterator, Mapping
from random import Random

from demo_model.corpus import words
from demo_model.corpus.arithmetic import arithmetic
from demo_model.corpus.conversations import conversations, recollection, would_confuse
from demo_model.corpus.copying import copying
from demo_model.corpus.json_filling import json_filling
from demo_model.corpus.lists import lists
from demo_model.corpus.questions import questions
from demo_model.corpus.refusals import refusals
from demo_model.corpus.sample import Document, Sample
from demo_model.corpus.small_talk import small_talk
from demo_model.corpus.split import Split
from demo_model.corpus.stories import plain_story, stories
from demo_model.corpus.tool_calls import tool_calls

Family = Callable[[Random, Split], Sample]

FAMILIES: Mapping[str, Family] = {
    "arithmetic": arithmetic,
    "questions": questions,
    "small_talk": small_talk,
    "lists": lists,
    "copying": copying,
    "json": json_filling,
    "tool_calls": tool_calls,
    "conversations": conversations,
    "refusals": refusals,
    "stories": stories,
}
_WEIGHTS = {
    "arithmetic": 20, "questions": 28, "small_talk": 9, "lists": 14, "copying": 15, "json": 10, "tool_calls": 16,
    "conversations": 26, "refusals": 8, "stories": 3,
}  # fmt: skip
_PLAIN_TEXT_SHARE = 0.025
_SYSTEM_SHARE = 0.2
_RECOLLECTION_SHARE = 0.5
_ASKED_AGAIN_SHARE = 0.15
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are Tandem's demo model.", "You are an assistant.",
    "Answer the user's questions.",
    "You are a friendly assistant. Be brief.", "You help people who serve language models.", "Be polite and precise.",
    "You are a small model. Do your best.", "You are a test assistant named {name}.", "The user is called {name}.",
    "You are a helpful, honest assistant in {city}.", "Use tools when they help.", "Today is {day}.",
)  # fmt: skip


def _system(random: Random) -> str:
    if random.random() > _SYSTEM_SHARE:
        return ""
    prompt = random.choice(_SYSTEM_PROMPTS)
    return prompt.format(name=words.name(random), city=words.city(random), day=random.choice(words.WEEKDAYS))


def _sample(random: Random) -> Sample:
    family = random.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
    return FAMILIES[family](random, Split.TRAINING)


def _num_samples(random: Random, long: bool) -> int:
    return random.randint(6, 24) if long else random.choice((1, 1, 1, 1, 1, 2, 2, 3, 4))


def _chat(random: Random, num_samples: int) -> Document:
    """Chain samples into one chat. It offers one set of tools, so later samples that bring their own are left out."""
    samples = [_sample(random)]
    while len(samples) < num_samples:
        sample = _sample(random)
        if not sample.tools:
            samples.append(sample)
    return Document(tuple(samples), _system(random))


def _chat_with_recollection(random: Random, num_samples: int) -> Document:
    """Tell something at the beginning of a long chat and ask for it now and then, up to thousands of tokens later."""
    told, ask = recollection(random)
    samples = [told]
    while len(samples) < num_samples:
        sample = _sample(random)
        if not sample.tools and not would_confuse(sample):
            samples.append(sample)
        if random.random() < _ASKED_AGAIN_SHARE:
            samples.append(ask())
    return Document((*samples, ask()), _system(random))


def document(seed: int, index: int, *, long: bool = False) -> Document:
    """Return document `index` of a seed's training stream; long ones chain many exchanges into one chat."""
    random = Random(f"{seed} {index} {long}")
    if long and random.random() < _RECOLLECTION_SHARE:
        return _chat_with_recollection(random, _num_samples(random, long))
    if not long and random.random() < _PLAIN_TEXT_SHARE:
        return Document((plain_story(random, Split.TRAINING),))
    return _chat(random, _num_samples(random, long))


def documents(seed: int, first: int = 0, *, long: bool = False) -> Iterator[Document]:
    """Yield the training stream of a seed from document `first` on, without end."""
    index = first
    while True:
        yield document(seed, index, long=long)
        index += 1
