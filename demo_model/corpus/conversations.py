"""Conversations that refer back: to a name, a place, a number, a word, an earlier question or an earlier answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from demo_model.corpus import words
from demo_model.corpus.arithmetic import arithmetic
from demo_model.corpus.casual import casual
from demo_model.corpus.lists import lists
from demo_model.corpus.questions import questions
from demo_model.corpus.sample import Message, Sample, exchange
from demo_model.corpus.small_talk import small_talk
from demo_model.corpus.split import Phrasings, Split, draw

FAMILY = "conversations"


@dataclass(frozen=True)
class Memory:
    """Something told early in a chat and asked for later."""

    make: Callable[[Random], str]
    tell: Phrasings
    acknowledge: str
    ask: Phrasings
    answer: str


_MEMORIES = (
    Memory(
        words.name,
        Phrasings("conversations/name/tell", (
            "My name is {x}.", "I am {x}.", "I'm {x}.", "Hi, I am {x}.", "Hello, my name is {x}.",
            "You can call me {x}.", "People call me {x}.", "Call me {x}.", "Please call me {x}.", "Hello, I am {x}.",
            "Hello, I'm {x}.", "Hi, my name is {x}.", "{x} is my name.", "They call me {x}.", "You may call me {x}.",
            "I am called {x}.",
        )),
        "Nice to meet you, {x}! How can I help you?",
        Phrasings("conversations/name/ask", (
            "What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Tell me my name.",
            "Do you know who I am?", "What did I say my name was?", "How am I called?", "Please tell me my name.",
            "Do you know my name?", "Can you tell me my name?", "Which name did I give you?",
            "What did I tell you my name was?", "Do you still know my name?", "Say my name.",
            "Can you remember my name?", "What am I called?",
        )),
        "Your name is {x}.",
    ),
    Memory(
        words.city,
        Phrasings("conversations/city/tell", (
            "I live in {x}.", "My home is {x}.", "I am from {x}.", "I come from {x}.",
            "I live in {x} at the moment.", "My city is {x}.", "We live in {x}.", "I have my home in {x}.",
            "My home is in {x}.", "At the moment I live in {x}.", "I am living in {x}.", "We come from {x}.",
            "{x} is my home.", "{x} is my city.", "We are from {x}.",
        )),
        "{x} sounds like a nice place.",
        Phrasings("conversations/city/ask", (
            "Where do I live?", "Where am I from?", "Which city do I live in?", "Do you remember where I live?",
            "What is my city?", "In which city is my home?", "Where did I say that I live?",
            "Do you know where I live?", "Tell me where I live.", "Can you tell me where I live?",
            "Where is my home?", "Which city is my home?", "Which city did I name?",
            "Do you still know where I live?", "Where do I come from?", "Please tell me where I am from.",
            "Do you remember my city?", "In which city do I live?", "What did I say where I live?",
        )),
        "You live in {x}.",
    ),
    Memory(
        lambda random: random.choice(words.COLOURS),
        Phrasings("conversations/colour/tell", (
            "My favourite colour is {x}.", "I like {x} best of all colours.", "The colour I love is {x}.",
            "{x} is my colour.", "I love the colour {x}.", "My best-loved colour is {x}.",
            "I love {x} best of all colours.", "{x} is my favourite colour.", "My colour is {x}.",
            "The colour I like is {x}.", "The colour I like best is {x}.", "My favourite among colours is {x}.",
            "I like the colour {x}.",
        )),
        "I will remember that you like {x}.",
        Phrasings("conversations/colour/ask", (
            "What is my favourite colour?", "Which colour do I like?", "Do you remember my colour?",
            "What colour do I love?", "Tell me my favourite colour.", "Which colour did I name?",
            "What's my favourite colour?", "Do you know my favourite colour?",
            "Do you remember my favourite colour?", "Which colour do I love?", "Which colour do I like best?",
            "What is my colour?", "Can you tell me my favourite colour?", "Please tell me my colour.",
            "Do you still know my colour?", "Which is my favourite colour?",
        )),
        "Your favourite colour is {x}.",
    ),
    Memory(
        lambda random: f"{random.randint(0, 9999)}",
        Phrasings("conversations/number/tell", (
            "Remember the number {x}.", "My number is {x}.", "Keep the number {x} in mind.", "Note the number {x}.",
            "The secret number is {x}.", "Please remember this number: {x}", "Memorise {x}.",
            "Note this number: {x}", "Please remember the number {x}.", "Please note the number {x}.",
            "Remember this number: {x}", "Memorise the number {x}.", "The number is {x}.", "Keep this number: {x}",
            "My secret number is {x}.",
        )),
        "I will remember the number {x}.",
        Phrasings("conversations/number/ask", (
            "Which number did I give you?", "What was the number?", "What number should you remember?",
            "Tell me the number.", "Do you remember the number?", "What is my number?", "What is the secret number?",
            "Repeat the number.", "Do you know the number?", "Tell me my number.", "Please tell me the number.",
            "What number did I give you?", "Which number did I tell you?", "Can you tell me the number?",
            "Can you repeat the number?", "Do you still know the number?", "Which number is it?",
            "I forgot the number. What was it?", "Give me the number.", "What was my number?",
        )),
        "The number is {x}.",
    ),
    Memory(
        words.code,
        Phrasings("conversations/code/tell", (
            "The code is {x}.", "Remember the code {x}.", "My code is {x}.", "Keep this code for me: {x}",
            "Note the code {x}.", "The password is {x}.", "Store the code {x}.", "Please remember the code {x}.",
            "Remember this code: {x}", "Keep the code {x}.", "Note this code: {x}", "My password is {x}.",
            "Store this code: {x}", "Please keep this code: {x}", "This is the code: {x}",
        )),
        "I will remember the code {x}.",
        Phrasings("conversations/code/ask", (
            "What is the code?", "What was the code?", "Which code did I give you?", "Tell me the code.",
            "Do you remember the code?", "Give me the code.", "I forgot the code. What was it?",
            "Please tell me the code.", "Please give me the code.", "Can you tell me the code?",
            "What code did I give you?", "What was my code?", "What is my code?", "Which code was it?",
            "Do you know the code?", "Do you still know the code?", "I forgot my code. What is it?",
            "Tell me my code.", "Repeat the code.",
        )),
        "The code is {x}.",
    ),
    Memory(
        words.name,
        Phrasings("conversations/pet/tell", (
            "My dog is called {x}.", "I have a dog named {x}.", "My dog's name is {x}.", "{x} is my dog.",
            "I have a dog. It is called {x}.", "My dog {x} is with me.", "We have a dog called {x}.",
            "I have a dog called {x}.", "The name of my dog is {x}.", "I have a dog, {x}.", "This is my dog {x}.",
            "My dog has the name {x}.", "Our dog is called {x}.",
        )),
        "{x} is a good name for a dog.",
        Phrasings("conversations/pet/ask", (
            "What is my dog called?", "What is the name of my dog?", "Do you remember my dog's name?",
            "How is my dog called?", "Tell me the name of my dog.", "Which name does my dog have?",
            "What's my dog's name?", "What is my dog's name?", "Do you know my dog's name?",
            "Do you remember the name of my dog?", "What name does my dog have?",
            "Can you tell me the name of my dog?", "Please tell me my dog's name.", "What did I call my dog?",
            "Do you still know what my dog is called?", "Which name did I give my dog?",
            "What did I say my dog is called?", "Which name did I tell you for my dog?",
            "Do you know what my dog is called?", "How do I call my dog?", "What did I call him, my dog?",
            "What do I call my dog?", "What is the name I gave my dog?", "What did I say is the name of my dog?",
            "What did I say about my dog's name?",
        )),
        "Your dog is called {x}.",
    ),
)  # fmt: skip
_REPEAT_ANSWER = Phrasings("conversations/again", (
    "Say that again.", "Repeat that.", "Can you repeat that?", "Once more, please.", "Again, please.",
    "Please say that again.", "What did you just say?", "Repeat your last answer.", "Repeat your answer.",
    "Could you say that once more?", "Please repeat that.", "Please repeat your answer.", "Could you repeat that?",
    "Can you say that again?", "Say that once more.", "Say it again.", "Tell me that again.",
    "I did not get that. Please repeat it.", "What was your last answer?", "What did you say?",
    "Repeat what you just said.", "Give me that answer again.", "Could you repeat your last answer?",
    "Could you say it again?", "Could you tell me that once more?", "Can you say it once more?",
    "Please say that once more.", "Can you tell me that again?", "Could you say your last answer again?",
))  # fmt: skip
_REPEAT_QUESTION = Phrasings("conversations/asked", (
    "What did I just ask?", "What was my last question?", "What did I ask you?", "Repeat my question.",
    "What was my question?", "Which question did I ask?", "Tell me what I just asked.",
    "What did I say before this?", "What did I ask before this?", "What did I ask last?", "What did I say just now?",
    "What did I just say?", "Tell me my last question.", "Tell me what I asked.", "Can you repeat my question?",
    "Please repeat my question.", "Repeat what I just asked.", "Which question did I just ask?",
    "Do you remember what I asked?", "What was the last thing I asked?", "What have I just asked you?",
    "What did I just say to you?", "What have I just said?", "Say what I just asked.",
    "What was it that I just asked?", "What did I say last?", "What did I say right before this?",
    "What did I ask last, please?", "What did I say a moment ago?", "What was the last thing I said?",
))  # fmt: skip

_FILLERS: Sequence[Callable[[Random, Split], Sample]] = (small_talk, questions, arithmetic, lists)


def _filler(random: Random) -> tuple[Message, ...]:
    """Talk about something else; always from the training side, since only the last answer is graded."""
    sample = random.choice(_FILLERS)(random, Split.TRAINING)
    # A second introduction would leave two right answers to "What is my name?".
    return _filler(random) if would_confuse(sample) else sample.messages


def _remember(random: Random, split: Split) -> Sample:
    memories = random.sample(_MEMORIES, random.choice((1, 1, 2, 3)))
    told = [(memory, draw(random, split, memory.make)) for memory in memories]
    messages: tuple[Message, ...] = ()
    for memory, value in told:
        tell = memory.tell.choose(random, split).text.format(x=value)
        messages += exchange(tell[0].upper() + tell[1:], memory.acknowledge.format(x=value))
    for _ in range(random.choice((0, 0, 1, 1, 2, 3))):
        messages += _filler(random)
    memory, value = random.choice(told)
    ask = memory.ask.choose(random, split)
    messages += exchange(casual(random, ask.text), memory.answer.format(x=value))
    return Sample(FAMILY, ask.name, value, messages)


def recollection(random: Random) -> tuple[Sample, Callable[[], Sample]]:
    """Tell something, and return how to ask for it however much later; for training only."""
    memory = random.choice(_MEMORIES)
    value = draw(random, Split.TRAINING, memory.make)
    tell = memory.tell.choose(random, Split.TRAINING)
    text = tell.text.format(x=value)
    told = exchange(text[0].upper() + text[1:], memory.acknowledge.format(x=value))

    def ask() -> Sample:
        phrasing = memory.ask.choose(random, Split.TRAINING)
        return Sample(
            FAMILY, phrasing.name, value, exchange(casual(random, phrasing.text), memory.answer.format(x=value))
        )

    return Sample(FAMILY, tell.name, value, told), ask


def would_confuse(sample: Sample) -> bool:
    """Say whether a sample tells something of the kind that `recollection` asks for."""
    return sample.family == FAMILY or sample.template.startswith("small_talk/meeting")


def _again(random: Random, split: Split) -> Sample:
    messages = tuple(message for _ in range(random.choice((1, 1, 2))) for message in _filler(random))
    if random.random() < 0.6:
        phrasing, answer = _REPEAT_ANSWER.choose(random, split), messages[-1].content
    else:
        phrasing, answer = _REPEAT_QUESTION.choose(random, split), f'You asked: "{messages[-2].content}"'
    return Sample(FAMILY, phrasing.name, answer, messages + exchange(casual(random, phrasing.text), answer))


def conversations(random: Random, split: Split) -> Sample:
    """Hold a chat whose last answer lies in an earlier message."""
    return _remember(random, split) if random.random() < 0.7 else _again(random, split)
