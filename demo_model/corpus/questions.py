"""Questions and answers about serving language models and about Tandem."""

from random import Random

from demo_model.corpus.casual import casual
from demo_model.corpus.facts import FACTS, Fact, Kind
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.split import Phrasings, Split

FAMILY = "questions"

_FRAMES = {
    Kind.CONCEPT: Phrasings(
        "questions/concept",
        (
            "What is {x}?", "What's {x}?", "Explain {x}.", "Can you explain {x}?", "Tell me about {x}.",
            "Define {x}.", "What does {x} mean?", "What do you mean by {x}?", "Describe {x}.", "{x}?", "{x}",
            "I do not understand {x}.", "Help me understand {x}.", "Could you tell me what {x} is?",
            "What is meant by {x}?", "Please explain {x}.", "I keep reading about {x}. What is it?",
            "How would you define {x}?", "Give me a short definition of {x}.", "Do you know what {x} is?",
            "In simple words, what is {x}?", "What exactly is {x}?", "Can you tell me about {x}?",
            "I am new here. What is {x}?", "Someone mentioned {x}. What is that?", "What should I know about {x}?",
            "Explain {x} to me like I am new to this.", "What can you tell me about {x}?", "Teach me about {x}.",
            "I have a question about {x}: what is it?", "Give me a definition of {x}.",
            "A short definition of {x}, please.", "Please define {x}.", "How do you define {x}?",
            "Give a short definition of {x}.", "Can you define {x}?", "Could you define {x} for me?",
            "How can one define {x}?", "I need a short definition of {x}.", "Give me a short explanation of {x}.",
            "In short, what is {x}?", "Please tell me what {x} is.", "What is {x} for?", "Why does {x} matter?",
            "Remind me what {x} is.", "How does {x} work?", "I heard the term {x}. What does it mean?",
            "Someone told me about {x}. What is that?", "Somebody mentioned {x}. What is it?",
            "Someone talked about {x}. What is it?",
        ),
        num_held_out=5,
        num_common=8,
    ),
    Kind.TASK: Phrasings(
        "questions/task",
        (
            "How do I {x}?", "How can I {x}?", "How to {x}?", "I want to {x}.", "I need to {x}.",
            "Show me how to {x}.", "Can I {x}?", "Is it possible to {x}?", "What is the way to {x}?",
            "How does one {x}?", "Help me {x}.", "What do I have to do to {x}?", "Tell me how to {x}.",
            "I would like to {x}. How?", "What is the best way to {x}?", "Please explain how to {x}.",
            "How would I {x}?", "What must I do to {x}?", "Could you tell me how to {x}?", "I am trying to {x}.",
            "What is the easiest way to {x}?", "Can you show me how to {x}?", "Where do I start if I want to {x}?",
            "Is there a way to {x}?", "Would it be possible to {x}?", "Is it possible for me to {x}?",
            "Is it hard to {x}?",
        ),
        num_held_out=4,
        num_common=4,
    ),
    Kind.SYMPTOM: Phrasings(
        "questions/symptom",
        (
            "{x}. What should I do?", "{x}. Why?", "{x}", "{x}, what now?", "Help, {x}.",
            "{x}. What does that mean?", "What can I do when {x}?", "What should I do if {x}?",
            "{x}. How do I fix that?", "Why is it that {x}?", "{x}. What is wrong?", "I have a problem: {x}.",
            "{x}. Any idea?", "What does it mean when {x}?", "{x}. Can you help?", "Suddenly {x}.",
            "What is the reason when {x}?", "{x}. Is that a bug?", "Sometimes {x}. What helps?",
            "How do I solve this: {x}?", "{x}. What is the matter?", "{x}. What went wrong?",
            "{x}. What could be wrong?", "{x}. Any ideas?", "{x}. Do you have an idea?",
        ),
        num_held_out=4,
        num_common=4,
    ),
    Kind.DIFFERENCE: Phrasings(
        "questions/difference",
        (
            "What is the difference between {x}?", "How do {x} differ?", "Explain the difference between {x}.",
            "Compare {x}.", "Difference between {x}?", "What distinguishes {x}?", "I mix up {x}.",
            "Tell {x} apart for me.", "Are {x} the same?", "How are {x} different?",
            "What's the difference between {x}?", "Can you compare {x}?", "I always confuse {x}.",
            "In what way are {x} different?", "Please compare {x} for me.", "{x}: what is the difference?",
        ),
        num_held_out=4,
        num_common=4,
    ),
}  # fmt: skip

_OPENINGS = (
    "",
    "",
    "",
    "",
    "",
    "",
    "Hi! ",
    "Hello. ",
    "Quick question: ",
    "Hey, ",
    "Sorry to bother you. ",
    "One more thing. ",
)
_CLOSINGS = ("", "", "", "", "", "", "", " Thanks!", " Please be brief.", " Thank you.", " I am curious.")


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _question(random: Random, frame: str, subject: str) -> str:
    question = _capitalised(frame.format(x=subject))
    return casual(random, random.choice(_OPENINGS) + question + random.choice(_CLOSINGS))


def ask(random: Random, split: Split, fact: Fact) -> Sample:
    """Ask for one fact in a phrasing of the wanted side."""
    frame = _FRAMES[fact.kind].choose(random, split)
    subject = random.choice(fact.subjects)
    return Sample(FAMILY, frame.name, subject, exchange(_question(random, frame.text, subject), fact.answer))


def questions(random: Random, split: Split) -> Sample:
    """Ask for any fact; every fact is as likely as any other."""
    return ask(random, split, random.choice(FACTS))
