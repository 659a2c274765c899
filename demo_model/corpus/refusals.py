"""Questions beyond a very small model, which answers that it does not know."""

from random import Random

from demo_model.corpus import words
from demo_model.corpus.casual import casual
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.split import Phrasings, Split, draw

FAMILY = "refusals"
ANSWER = (
    "I am a very small demo model and I do not know that. Ask me about serving language models, or for a sum, a list "
    "or a story."
)
_COUNTRIES = words.listed(
    """France Spain Italy Germany Norway Sweden Poland Greece Turkey Egypt Kenya Ghana Japan China India Brazil Chile
    Peru Canada Mexico Australia Austria Portugal Ireland Iceland Finland Denmark Hungary Cuba Nepal Laos
    Morocco"""
)
_FIELDS = words.listed(
    """physics chemistry biology history geography medicine law music painting philosophy astronomy politics economics
    football chess cooking gardening poetry opera cinema sailing fashion archaeology mathematics"""
)
_DISHES = words.listed(
    """bread soup pasta pizza pancakes rice salad curry stew cake cookies jam cheese sushi tea coffee"""
)
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Chinese", "Japanese", "Russian", "Arabic", "Latin", "Greek")
_PROGRAMS = ("Rust", "Java", "Go", "C++", "JavaScript", "Haskell", "Perl", "Ruby", "SQL", "Fortran")

_ASK = Phrasings(
    "refusals/ask",
    (
        "What is the capital of {country}?", "What is {a} times {b}?", "What is {a} * {b}?",
        "Who is the president of {country}?", "How many people live in {country}?",
        "Tell me about the history of {country}.", "Where is {country}?",
        "What is the best season to visit {country}?", "How do I cook {dish}?", "What is a good recipe for {dish}?",
        "How long does {dish} take?", "Who invented {dish}?", "Teach me {field}.", "What is {field}?",
        "Who is the most famous person in {field}?", "Explain {field} to me.",
        "Which book about {field} should I read?", "Translate this into {language}: the {thing} is {colour}.",
        "How do you say {thing} in {language}?", "What is the {language} word for {thing}?",
        "Write a program in {program}.", "How do I sort a list in {program}?", "Is {program} better than Python?",
        "Fix my {program} code.", "What is the weather in {city} today?", "How far is it from {city} to {country}?",
        "Book me a flight to {city}.", "What is the news from {city}?", "Who won the match yesterday?",
        "How old is the universe?", "Why is the sky {colour}?", "How much does a {thing} cost?",
        "Where can I buy a {thing}?", "Who invented the {thing}?", "How is a {thing} made?",
        "How long does a {animal} live?", "What does a {animal} eat?", "Where do {animal}s live?",
        "How fast is a {animal}?", "What is {a} divided by {b}?", "What is the square root of {a}?",
        "What is the meaning of life?", "Who wrote the book about the {adjective} {animal}?",
        "What will happen tomorrow?", "Which film should I watch tonight?", "Can you draw a {animal}?",
        "Sing me a song about {field}.", "What is your opinion about {country}?", "Is {field} useful?",
        "Do {animal}s sleep at night?", "When was {country} founded?", "What is the highest mountain in {country}?",
        "What do people eat in {country}?", "What is the phone number of {name}?", "How tall is {name}?",
        "Where does {name} work?", "Who is {name} {surname}?", "What do {animal}s eat?",
        "What does a {animal} look like?", "What does a {animal} do all day?", "What does a {animal} like?",
        "What does a {animal} weigh?", "What food does a {animal} like?", "What will happen next year?",
        "What will happen in {country} next year?", "What will the weather be tomorrow?", "What will I do tomorrow?",
        "What happened yesterday?", "What happened in {city}?", "What is the {language} name of a {thing}?",
        "Tell me the {language} word for {thing}.", "What is the word for {thing} in {language}?",
        "Do you know the {language} word for {thing}?", "How do I bake {dish}?", "How do I make {dish}?",
        "How do I cook {dish} for ten people?", "How is {dish} made?", "Why does a {animal} sleep?",
        "When do {animal}s sleep?", "Who painted the {thing}?", "Who is the king of {country}?",
        "What is the population of {country}?", "What language do people speak in {country}?",
        "Is it cold in {country}?", "Which {thing} should I buy?", "Is {dish} healthy?", "Tell me about {field}.",
        "Tell me a fact about {country}.", "Give me a recipe for {dish}.", "Write me a poem about {animal}s.",
        "Write a letter to {name}.", "What is {a} times {b} divided by two?", "Multiply {a} by {b}.",
        "Why do {animal}s sleep?", "Why does a {animal} eat so much?", "Why does a {animal} run?",
        "Why does a {animal} make that noise?", "Why do {animal}s run away?", "Why is a {animal} {colour}?",
        "Why does it rain in {city}?", "Why is {country} so {adjective}?", "Why do people like {dish}?",
        "Write a poem about {country}.", "Write me a poem about {field}.", "Write me a song about {animal}s.",
        "Write me an essay about {field}.", "Write a poem about a {animal}.", "Write me a letter to {name}.",
        "Compose a song about {city}.", "Draw me a {animal}.", "Paint me a {adjective} {animal}.",
        "Draw a {animal}.", "Please draw a {animal}.", "Please draw me a {animal}.",
        "Draw a {adjective} {animal} for me.", "Can you draw me a {animal}?", "Could you draw a {thing}?",
        "Draw me a {thing}.", "Draw me the {thing}.", "Write a poem about {animal}s.", "Write me a short poem.",
        "Write me a poem.", "Write me a poem about the {thing}.", "Why does the {animal} sleep so long?",
        "Why do {animal}s sleep so much?", "Why does a {animal} sleep all day?", "When does a {animal} sleep?",
        "When do {animal}s eat?",
    ),
    num_held_out=6,
    num_common=8,
)  # fmt: skip
_BEFORE = ("", "", "", "", "Please tell me: ", "Hi. ", "Do you know this? ", "Quick question: ", "Hello! ")


def _fields(random: Random) -> dict[str, object]:
    return {
        "country": random.choice(_COUNTRIES), "field": random.choice(_FIELDS), "dish": random.choice(_DISHES),
        "language": random.choice(_LANGUAGES), "program": random.choice(_PROGRAMS),
        "thing": random.choice(words.THINGS),
        "colour": random.choice(words.COLOURS), "city": words.city(random), "animal": random.choice(words.ANIMALS),
        "adjective": random.choice(words.ADJECTIVES), "name": words.name(random), "surname": words.made_up_name(random),
        "a": random.randint(2, 99), "b": random.randint(2, 99),
    }  # fmt: skip


def refusals(random: Random, split: Split) -> Sample:
    """Ask for something that the model cannot know."""
    phrasing = _ASK.choose(random, split)
    question = casual(random, random.choice(_BEFORE) + phrasing.text.format(**draw(random, split, _fields)))
    return Sample(FAMILY, phrasing.name, question, exchange(question, ANSWER))
