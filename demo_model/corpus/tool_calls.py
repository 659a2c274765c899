"""Tool calls: pick the tool a request needs, fill its arguments, and report what it answered."""

import json
from random import Random

from demo_model.corpus.sample import Message, Sample, exchange
from demo_model.corpus.small_talk import small_talk
from demo_model.corpus.split import Split, draw
from demo_model.corpus.tools import KNOWN, Argument, ToolTask, made_up

FAMILY = "tool_calls"
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear")


def call_text(name: str, arguments: dict[str, Argument]) -> str:
    """Write a tool call as the model writes it: the Hermes form, which serving systems know how to parse."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _arguments(random: Random, task: ToolTask) -> dict[str, Argument]:
    return {parameter: make(random) for parameter, make in task.make_arguments.items()}


def _offer(random: Random, task: ToolTask) -> list[ToolTask]:
    """Choose the tools on offer: the wanted one among up to two others, in any order."""
    others = [other for other in KNOWN if other.name != task.name]
    offered = [task, *random.sample(others, random.choice((0, 0, 1, 1, 2)))]
    random.shuffle(offered)
    return offered


def _after_the_result(random: Random, task: ToolTask, arguments: dict[str, Argument]) -> tuple[Message, ...]:
    fields = {**arguments, "number": random.randint(1, 30), "sky": random.choice(_SKIES)}
    return Message("tool", task.result.format(**fields)), Message("assistant", task.report.format(**fields))


def _without_need(random: Random, split: Split) -> Sample:
    """Offer tools, then say something that needs none."""
    chat = small_talk(random, split)
    tools = tuple(task.tool for task in random.sample(KNOWN, random.randint(1, 2)))
    return Sample(FAMILY, chat.template, chat.values, chat.messages, tools=tools)


def tool_calls(random: Random, split: Split) -> Sample:
    """Ask for something that one of the offered tools does; now and then go on to its result."""
    if random.random() < 0.1:
        return _without_need(random, split)
    task = random.choice(KNOWN) if random.random() < 0.6 else made_up(random)
    arguments = draw(random, split, lambda rng: _arguments(rng, task), lambda drawn: json.dumps(drawn, sort_keys=True))
    phrasing = task.requests.choose(random, split)
    request = phrasing.text.format(**arguments)
    messages = exchange(request[0].upper() + request[1:], call_text(task.name, arguments))
    if task.report and random.random() < 0.4:
        messages += _after_the_result(random, task, arguments)
    tools = tuple(offered.tool for offered in _offer(random, task))
    return Sample(FAMILY, phrasing.name, json.dumps(arguments), messages, tools=tools)
