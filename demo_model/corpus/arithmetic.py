"""Sums and differences of numbers from 0 to 99, worked digit by digit so that a small model can learn them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo_model.corpus import words
from demo_model.corpus.casual import casual
from demo_model.corpus.sample import Sample, exchange
from demo_model.corpus.split import Phrasings, Split, values_are_held_out

FAMILY = "arithmetic"
_LARGEST = 99
_SMALLEST_HELD_OUT = 20
"""Pairs whose larger number is below this are never held out: they are the steps of every longer sum."""

_SUM = Phrasings(
    "arithmetic/sum",
    (
        "What is {a} + {b}?", "{a} + {b}", "{a} + {b} = ?", "{a}+{b}", "{a}+{b}=", "What's {a} + {b}?",
        "Calculate {a} + {b}.", "Compute {a} + {b}.", "Add {a} and {b}.", "What is the sum of {a} and {b}?",
        "How much is {a} plus {b}?", "What is {a} plus {b}?", "What do {a} and {b} make?", "Please add {b} to {a}.",
        "Can you add {a} and {b} for me?", "Work out {a} + {b}.", "I need the sum of {a} and {b}.", "{a} plus {b}?",
        "Tell me what {a} + {b} is.", "What does {a} + {b} equal?", "Solve {a} + {b}.", "Sum {a} and {b}, please.",
        "What do you get when you add {a} and {b}?", "Could you tell me what {a} plus {b} is?",
        "How much is {a}+{b}?", "Give me the result of {a} + {b}.", "Find {a} + {b}.", "Let us add {a} and {b}.",
        "The sum of {a} and {b}?", "Sum of {a} and {b}, please.", "Sum up {a} and {b}.",
        "Please calculate {a} + {b}.", "Please sum {a} and {b}.", "Add {a} + {b}, please.", "Now add {b} to {a}.",
        "Can you tell me what {a} + {b} is?", "Can you calculate {a} plus {b}?", "What is the result of {a} + {b}?",
        "What is the total of {a} and {b}?", "Total of {a} and {b}?", "Add up {a} and {b}.",
        "I want to add {a} and {b}.", "How much are {a} and {b} together?", "What are {a} and {b} together?",
        "{a} and {b} together, how much is that?", "If I add {b} to {a}, what do I get?",
        "Put {a} and {b} together.", "Could you add {a} and {b}?", "Do you know what {a} + {b} is?",
        "Find the sum of {a} and {b}.", "Let's add {a} and {b}.", "Give me {a} + {b}.", "{a} + {b}, please",
        "And {a} + {b}?", "What is the result of adding {a} and {b}?", "What is {a} and {b} together?",
    ),
    num_held_out=4,
    num_common=10,
)  # fmt: skip
_DIFFERENCE = Phrasings(
    "arithmetic/difference",
    (
        "What is {a} - {b}?", "{a} - {b}", "{a} - {b} = ?", "{a}-{b}", "{a}-{b}=", "What's {a} - {b}?",
        "Calculate {a} - {b}.", "Compute {a} - {b}.", "Subtract {b} from {a}.", "Take {b} away from {a}.",
        "How much is {a} minus {b}?", "What is {a} minus {b}?", "What is left of {a} after taking away {b}?",
        "Can you subtract {b} from {a} for me?", "Work out {a} - {b}.", "{a} minus {b}?", "Solve {a} - {b}.",
        "What is the difference when you subtract {b} from {a}?", "Tell me what {a} - {b} is.", "Find {a} - {b}.",
        "What does {a} - {b} equal?", "Please subtract {b} from {a}.", "Could you tell me what {a} minus {b} is?",
        "Give me the result of {a} - {b}.", "How much is {a}-{b}?", "I need {a} minus {b}.",
        "Please calculate {a} - {b}.", "Now subtract {b} from {a}.", "Subtract {b} from {a}, please.",
        "Can you tell me what {a} - {b} is?", "Can you calculate {a} minus {b}?", "What is the result of {a} - {b}?",
        "The difference of {a} and {b}?", "I want to subtract {b} from {a}.",
        "If I take {b} from {a}, what do I get?", "Take {b} from {a}.", "Could you subtract {b} from {a}?",
        "Do you know what {a} - {b} is?", "Find {a} minus {b}.", "Let's subtract {b} from {a}.",
        "Give me {a} - {b}.", "{a} - {b}, please", "And {a} - {b}?", "How much is {a} less {b}?",
        "Please take {b} away from {a}.", "What remains of {a} when you take away {b}?",
        "What do you get when you subtract {b} from {a}?", "What is the difference of {a} and {b}?",
        "What is the difference between {a} and {b}?", "The difference between {a} and {b}?",
        "Difference of {a} and {b}?", "Find the difference of {a} and {b}.",
        "Tell me the difference of {a} and {b}.", "How much is left of {a} after taking away {b}?",
        "What is left of {a} when {b} is taken away?", "What is left of {a} if I take away {b}?",
        "Take away {b} from {a}. What is left?", "What is left after taking {b} from {a}?",
        "What is {a} after taking away {b}?",
    ),
    num_held_out=4,
    num_common=10,
)  # fmt: skip
_GAIN = Phrasings(
    "arithmetic/gain",
    (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "There are {a} {things} in a box. {name} puts in {b} more. How many {things} are in the box?",
        "{name} picked {a} {things} yesterday and {b} today. How many {things} is that?",
        "I have {a} {things} and you give me {b}. How many {things} do I have?",
        "One basket holds {a} {things}, another holds {b}. How many {things} are there together?",
        "{name} bought {a} {things} on Monday and {b} {things} on Friday. How many are there in all?",
        "A shop sold {a} {things} in the morning and {b} in the afternoon. How many {things} did it sell?",
        "A queue has {a} requests and {b} more arrive. How many requests are in the queue?",
        "{name} had {a} {things} and found {b} more. How many {things} does {name} have?",
        "There are {a} {things} on the table and {b} in the box. How many {things} are there in all?",
        "I have {a} {things} and get {b} more. How many {things} do I have now?",
        "I had {a} {things} and you gave me {b}. How many {things} do I have now?",
        "You have {a} {things} and I give you {b}. How many {things} do you have?",
        "{name} gives me {a} {things} and you give me {b}. How many {things} do I have?",
        "{name} has {a} {things} and buys {b} more. How many are there now?",
        "We have {a} {things} and {b} more come. How many {things} do we have?",
        "A box holds {a} {things}, another box holds {b}. How many {things} are in both?",
        "{name} ate {a} {things} yesterday and {b} today. How many {things} did {name} eat?",
        "A worker has {a} requests and gets {b} more. How many requests does it have?",
        "{a} requests are waiting and {b} more come. How many requests are waiting now?",
        "{name} sold {a} {things} on Monday and {b} on Tuesday. How many {things} is that in all?",
        "In one basket there are {a} {things}, in the other {b}. How many {things} are there?",
        "First there were {a} {things}, then {b} were added. How many {things} are there now?",
        "{a} {things} and {b} more {things}: how many {things} is that?",
    ),
)  # fmt: skip
_LOSS = Phrasings(
    "arithmetic/loss",
    (
        "{name} has {a} {things} and gives away {b}. How many {things} are left?",
        "There were {a} {things} on the table. {name} ate {b} of them. How many {things} remain?",
        "I had {a} {things} and lost {b}. How many {things} do I still have?",
        "A box holds {a} {things}. {name} takes out {b}. How many {things} are left in the box?",
        "A shop had {a} {things} and sold {b}. How many {things} are left?",
        "{name} picked {a} {things}, but {b} of them were bad. How many good {things} are there?",
        "Of {a} {things}, {b} are gone. How many are still there?",
        "A queue has {a} requests and {b} are answered. How many requests are still waiting?",
        "{name} had {a} {things} and lost {b}. How many {things} does {name} still have?",
        "There are {a} {things} in a box. {name} takes {b}. How many {things} are left?",
        "I have {a} {things} and give you {b}. How many {things} do I have left?",
        "You have {a} {things} and lose {b}. How many {things} do you have now?",
        "We had {a} {things} and ate {b}. How many {things} remain?",
        "A basket had {a} {things} and {b} fell out. How many {things} are still there?",
        "{name} had {a} {things} and sold {b}. How many {things} are left?",
        "{name} bought {a} {things}, but {b} of them were bad. How many were good?",
        "Of {a} {things}, {name} ate {b}. How many {things} are left?",
        "A worker has {a} requests and {b} end. How many requests are left?",
        "{a} requests were waiting and {b} are done. How many are still waiting?",
        "There were {a} {things}, {b} are gone now. How many {things} are still there?",
        "First there were {a} {things}, then {b} were taken away. How many {things} are left?",
        "I picked {a} {things} and gave away {b} of them. How many do I still have?",
        "{a} {things}, and {b} of them are sold: how many {things} are left?",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Operands:
    """Two numbers from 0 to 99, in the order they are asked."""

    a: int
    b: int

    @property
    def held_out(self) -> bool:
        """Return whether this pair, in either order, is kept for grading."""
        low, high = sorted((self.a, self.b))
        return high >= _SMALLEST_HELD_OUT and values_are_held_out(f"operands {low} {high}")


def operands(random: Random, split: Split) -> Operands:
    """Draw a pair of the wanted side; small numbers come up more often than their share."""
    while True:
        largest = 9 if random.random() < 0.1 else _LARGEST
        pair = Operands(random.randint(0, largest), random.randint(0, largest))
        if pair.held_out == (split is Split.HELD_OUT):
            return pair


def sum_in_steps(a: int, b: int) -> str:
    """Work out a + b from the ones to the tens, ending with the sum itself."""
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    first = f"Ones: {a % 10} + {b % 10} = {ones}{', carry 1' if carry else ''}."
    then = f"Tens: {a // 10} + {b // 10}{' + 1' if carry else ''} = {a // 10 + b // 10 + carry}."
    return f"{first} {then} So {a} + {b} = {a + b}."


def difference_in_steps(a: int, b: int) -> str:
    """Work out a - b from the ones to the tens; a pair with the smaller number first is swapped."""
    if a < b:
        return f"{a} is less than {b}, so turn it around. {difference_in_steps(b, a)} So {a} - {b} = -{b - a}."
    if a < 10 and b < 10:
        return f"{a} - {b} = {a - b}."
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow
    first = f"Ones: {ones} - {b % 10} = {ones - b % 10}{', borrow 1' if borrow else ''}."
    then = f"Tens: {a // 10} - {b // 10}{' - 1' if borrow else ''} = {a // 10 - b // 10 - borrow}."
    return f"{first} {then} So {a} - {b} = {a - b}."


def _sample(
    phrasings: Phrasings, random: Random, split: Split, steps: Callable[[int, int], str], pair: Operands
) -> Sample:
    phrasing = phrasings.choose(random, split)
    fields = {"a": pair.a, "b": pair.b, "name": words.name(random), "things": random.choice(words.FRUITS)}
    question = casual(random, phrasing.text.format(**fields))
    return Sample(FAMILY, phrasing.name, f"{pair.a} {pair.b}", exchange(question, steps(pair.a, pair.b)))


def arithmetic(random: Random, split: Split) -> Sample:
    """Ask for a sum or a difference, bare or wrapped in a small story."""
    pair = operands(random, split)
    in_story = random.random() < 0.25
    if random.random() < 0.5:
        return _sample(_GAIN if in_story else _SUM, random, split, sum_in_steps, pair)
    if in_story:
        pair = Operands(max(pair.a, pair.b), min(pair.a, pair.b))
    return _sample(_LOSS if in_story else _DIFFERENCE, random, split, difference_in_steps, pair)
