"""The tools that are offered in training: known ones with natural requests, and made-up ones to generalise from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from demo_model.corpus import words
from demo_model.corpus.sample import Tool
from demo_model.corpus.split import Phrasings

Argument = str | int


@dataclass(frozen=True)
class ToolTask:
    """A tool, how its arguments are drawn, the ways to ask for it, and what its result makes the model say."""

    tool: Tool
    make_arguments: Mapping[str, Callable[[Random], Argument]]
    requests: Phrasings
    result: str = ""
    report: str = ""

    @property
    def name(self) -> str:
        """Return the tool's name, as a call gives it."""
        return str(self.tool["function"]["name"])


def function_tool(name: str, description: str, parameters: Mapping[str, str]) -> Tool:
    """Describe a function as OpenAI's `tools` field does; `parameters` gives each one's JSON type."""
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _amount(random: Random) -> int:
    return random.randint(1, 500)


def _minutes(random: Random) -> int:
    return random.randint(1, 90)


def _day(random: Random) -> str:
    return random.choice(words.WEEKDAYS)


def _thing(random: Random) -> str:
    return f"{random.choice(words.ADJECTIVES)} {random.choice(words.THINGS)}"


def _worker(random: Random) -> str:
    return f"{random.choice(('prefill', 'decode', 'kv'))}-{random.randint(0, 40)}"


def _message(random: Random) -> str:
    who = random.choice(("I am", "we are", "the train is", "the parcel is", "dinner is"))
    return f"{who} {random.choice(('late', 'ready', 'here', 'on the way', 'in town', 'delayed'))}"


def _currency(random: Random) -> str:
    return random.choice(("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD"))


KNOWN = (
    ToolTask(
        function_tool("get_weather", "Get the weather in a city", {"city": "string"}),
        {"city": words.city},
        Phrasings("tools/weather", (
            "What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}",
            "Is it raining in {city}?", "Do I need an umbrella in {city}?", "Tell me the weather in {city}.",
            "Is it warm in {city} today?", "Check the weather in {city}, please.",
            "What's the weather like in {city}?", "Weather in {city}, please.",
            "How is the weather in {city} today?", "What is the weather like in {city}?", "Will it rain in {city}?",
            "Can you check the weather in {city}?", "Tell me whether it is warm in {city}.",
            "I need the weather in {city}.", "Is it cold in {city}?",
        )),
        '{{"temperature": {number}, "sky": "{sky}"}}', "It is {number} degrees and {sky} in {city}.",
    ),
    ToolTask(
        function_tool("get_time", "Get the local time in a city", {"city": "string"}),
        {"city": words.city},
        Phrasings("tools/time", (
            "What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?",
            "Time in {city}?", "Can you check the clock in {city}?", "What is the local time in {city}?",
            "I need the time in {city}.", "What's the time in {city}?", "Can you tell me the time in {city}?",
            "Please check the time in {city}.", "How late is it now in {city}?", "Which time is it in {city}?",
            "Tell me how late it is in {city}.", "What does the clock say in {city}?",
        )),
        '{{"hour": {number}}}', "It is {number} o'clock in {city}.",
    ),
    ToolTask(
        function_tool("set_timer", "Start a timer", {"minutes": "integer"}),
        {"minutes": _minutes},
        Phrasings("tools/timer", (
            "Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer, {minutes} minutes.",
            "Start a timer of {minutes} minutes.", "Remind me in {minutes} minutes.",
            "Please time {minutes} minutes.", "Can you set a {minutes} minute timer?",
            "Please set a timer for {minutes} minutes.", "Please start a timer of {minutes} minutes.",
            "Please wake me in {minutes} minutes.", "I need a timer for {minutes} minutes.",
            "Set the timer to {minutes} minutes.", "Can you remind me in {minutes} minutes?",
            "Time {minutes} minutes for me.", "Can you wake me in {minutes} minutes?",
        )),
        '{{"ok": true}}', "The timer is set for {minutes} minutes.",
    ),
    ToolTask(
        function_tool("send_message", "Send a message to a person", {"to": "string", "text": "string"}),
        {"to": words.name, "text": _message},
        Phrasings("tools/message", (
            "Tell {to} that {text}.", "Send {to} a message: {text}", "Write to {to} that {text}.",
            "Let {to} know that {text}.", "Message {to} that {text}.", "Please tell {to}: {text}",
            "Can you text {to} that {text}?", "Please let {to} know that {text}.",
            "Please send {to} a message: {text}", "Can you tell {to} that {text}?",
            "Can you write to {to} that {text}?", "Text {to} that {text}.", "Send a message to {to}: {text}",
            "I want {to} to know that {text}.", "Tell {to}: {text}",
        )),
        '{{"ok": true}}', "I told {to} that {text}.",
    ),
    ToolTask(
        function_tool("search", "Search the web", {"query": "string"}),
        {"query": _thing},
        Phrasings("tools/search", (
            "Search for {query}.", "Look up {query}.", "Find {query} on the web.", "Search the web for {query}.",
            "Can you look for {query}?", "Please search {query}.", "I want to find {query}.",
            "Please look up {query}.", "Please find {query} on the web.", "Can you search for {query}?",
            "Can you find {query}?", "Look for {query}.", "Look for {query} on the web, please.",
            "I want to search for {query}.", "I am looking for {query}.",
        )),
        '{{"hits": {number}}}', "I found {number} pages about {query}.",
    ),
    ToolTask(
        function_tool("add_event", "Put an event into the calendar", {"title": "string", "day": "string"}),
        {"title": _thing, "day": _day},
        Phrasings("tools/event", (
            "Put {title} into my calendar on {day}.", "Add {title} on {day}.", "Schedule {title} for {day}.",
            "On {day} I have {title}. Note that.", "Make an event for {title} on {day}.",
            "Please plan {title} for {day}.", "Enter {title} for {day}.",
            "Please put {title} into my calendar on {day}.", "Please add {title} on {day}.",
            "Please note {title} on {day}.", "Plan {title} for {day}.", "Can you schedule {title} for {day}?",
            "On {day} I have {title}. Please put it into my calendar.", "Note {title} for {day}.",
            "I have {title} on {day}. Make an event.",
        )),
        '{{"ok": true}}', "I put {title} into your calendar on {day}.",
    ),
    ToolTask(
        function_tool(
            "convert_money", "Convert an amount of money", {"amount": "integer", "source": "string", "target": "string"}
        ),
        {"amount": _amount, "source": _currency, "target": _currency},
        Phrasings("tools/money", (
            "Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?",
            "What are {amount} {source} in {target}?", "Change {amount} {source} into {target}.",
            "{amount} {source} in {target}", "Please convert {amount} {source} into {target}.",
            "Please change {amount} {source} to {target}.", "Please convert {amount} {source} to {target}.",
            "Can you convert {amount} {source} to {target}?", "How many {target} are {amount} {source}?",
            "How many {target} do I get for {amount} {source}?",
            "I have {amount} {source}. How much is that in {target}?", "What is {amount} {source} in {target}?",
            "Change {amount} {source} to {target}, please.", "{amount} {source} to {target}",
            "Turn {amount} {source} into {target}.",
        )),
        '{{"amount": {number}}}', "{amount} {source} are {number} {target}.",
    ),
    ToolTask(
        function_tool("worker_status", "Show the state of a worker", {"worker": "string"}),
        {"worker": _worker},
        Phrasings("tools/worker", (
            "How is {worker} doing?", "Show me the state of {worker}.", "Is {worker} healthy?", "Check {worker}.",
            "What is the status of {worker}?", "Look at {worker}, please.", "Can you check worker {worker}?",
            "Show me {worker}.", "Show me how {worker} is.", "Is {worker} doing well?", "How is worker {worker}?",
            "Please check {worker}.", "Can you look at {worker}?", "Check the state of {worker}, please.",
            "What is the state of {worker}?", "Check worker {worker}.",
        )),
        '{{"free_blocks": {number}}}', "{worker} has {number} free blocks.",
    ),
    ToolTask(
        function_tool("drain_worker", "Drain a worker", {"worker": "string"}),
        {"worker": _worker},
        Phrasings("tools/drain", (
            "Drain {worker}.", "Please drain {worker}.", "Take {worker} out of service.",
            "Let {worker} finish and stop.", "I want to drain {worker}.", "Start draining {worker}.",
            "Can you drain {worker}?", "Drain worker {worker}.", "Please take {worker} out of service.",
            "Can you take {worker} out of service?", "Please let {worker} finish and stop.", "Now drain {worker}.",
            "Please start draining {worker}.", "Could you drain {worker}?", "Take worker {worker} out.",
        )),
        '{{"ok": true}}', "{worker} is draining.",
    ),
)  # fmt: skip

_ACTIONS = ("open", "close", "read", "move", "count", "paint", "order", "print", "book", "find", "clean", "lock")
_OBJECT_PARAMETERS: dict[str, tuple[str, Callable[[Random], Argument], str]] = {
    "name": ("string", words.name, "for {name}"),
    "city": ("string", words.city, "in {city}"),
    "count": ("integer", _minutes, "{count} times"),
    "colour": ("string", lambda random: random.choice(words.COLOURS), "in the colour {colour}"),
    "day": ("string", _day, "on {day}"),
    "code": ("string", words.code, "with the code {code}"),
}
_MADE_UP_REQUESTS = (
    "Please {action} the {thing} {rest}.", "{Action} the {thing} {rest}.", "Can you {action} the {thing} {rest}?",
    "I want you to {action} the {thing} {rest}.", "Could you {action} the {thing} {rest}?",
    "Now {action} the {thing} {rest}.", "Please {action} a {thing} {rest}.", "{Action} a {thing} {rest}.",
    "Can you {action} a {thing} {rest}?", "Could you please {action} the {thing} {rest}?",
    "I want to {action} the {thing} {rest}.", "I need you to {action} the {thing} {rest}.",
    "Now please {action} the {thing} {rest}.", "{Action} the {thing} {rest}, please.",
    "I would like you to {action} the {thing} {rest}.", "Would you {action} the {thing} {rest}?",
)  # fmt: skip


def made_up(random: Random) -> ToolTask:
    """Make up a tool that no other sample has, with one or two parameters and the requests that need it."""
    action, thing = random.choice(_ACTIONS), random.choice(words.THINGS)
    parameters = random.sample(sorted(_OBJECT_PARAMETERS), random.randint(1, 2))
    rest = " ".join(_OBJECT_PARAMETERS[parameter][2] for parameter in parameters)
    requests = [
        text.replace("{action}", action)
        .replace("{Action}", action.capitalize())
        .replace("{thing}", thing)
        .replace("{rest}", rest)
        for text in _MADE_UP_REQUESTS
    ]
    return ToolTask(
        function_tool(
            f"{action}_{thing}",
            f"{action.capitalize()} the {thing}",
            {key: _OBJECT_PARAMETERS[key][0] for key in parameters},
        ),
        {parameter: _OBJECT_PARAMETERS[parameter][1] for parameter in parameters},
        Phrasings("tools/made_up", requests),
    )
