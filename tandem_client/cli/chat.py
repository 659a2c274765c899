"""`tandem chat`: asks questions, keeps the conversation and follows the /commands."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tandem_client import (
    AI,
    AuthenticationError,
    DeadlineExceededError,
    NotFoundError,
    TandemAPIError,
    TandemConnectionError,
)
from tandem_client.cli.chat_view import (
    History,
    Lines,
    PlainLines,
    PlainView,
    TerminalLines,
    TerminalView,
    View,
    history_path,
)
from tandem_client.cli.run import default_model
from tandem_client.inputs import StreamedInputs


def chat(ai: AI, options: ChatOptions, explain: Callable[[Exception], str]) -> int:
    """Chat until the user leaves or the input ends; return the exit code, 1 if a question from a pipe failed.

    `explain` returns the sentence for an error. Raises TandemAPIError or ValueError if the chat cannot begin.
    """
    _allow_any_bytes()
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    console = Console(highlight=False)
    view: View = TerminalView(console) if is_terminal else PlainView(sys.stdout, sys.stderr)
    session = _open(ai, options, view, explain, is_terminal)
    commands = Commands(session)
    lines: Lines = PlainLines(sys.stdin)
    if is_terminal:
        lines = TerminalLines(console, History(history_path(), view.note), commands.completions)
    _converse(session, commands, lines)
    return 1 if session.num_failed and not is_terminal else 0


def _open(ai: AI, options: ChatOptions, view: View, explain: Callable[[Exception], str], is_terminal: bool) -> Session:
    models = ai.models()
    model = default_model(ai) if options.model is None else served(options.model, models)
    view.open(model, ai.base_url)
    return Session(ai, options, model, models, view, explain, is_terminal, Conversation(options.system))


def _converse(session: Session, commands: Commands, lines: Lines) -> None:
    """Take messages until the input ends or the user presses Ctrl-C twice in a row."""
    num_interrupts = 0
    while num_interrupts < 2:
        try:
            message = lines.next_message()
            num_interrupts = 0
            _take(message, session, commands)
        except EOFError:
            session.view.break_line()
            return
        except Leave:
            return
        except KeyboardInterrupt:
            if not session.is_interactive:
                raise
            num_interrupts += 1
            session.view.break_line()
            if num_interrupts == 1:
                session.view.note("Ctrl-C again leaves, and so does Ctrl-D")


def _take(message: str, session: Session, commands: Commands) -> None:
    if not message.strip():
        return
    if not message.startswith("/") or message.startswith("//"):
        session.ask(message[1:] if message.startswith("//") else message)
        return
    try:
        commands.execute(message)
    except (CannotDo, TandemAPIError) as error:
        session.fail(error)


def _allow_any_bytes() -> None:
    """Replace bytes that are not UTF-8, and characters that the terminal cannot show, instead of raising an error."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@dataclass(frozen=True)
class Turn:
    """A question and its answer; `stopped`: the user stopped the answer before its end."""

    question: str
    answer: str
    stopped: bool = False


@dataclass
class Conversation:
    """The messages that go with each question, and the last question without an answer."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    unanswered: str | None = None

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return all messages so far, then `question`."""
        return [*self._said(), {"role": "user", "content": question}]

    def answered(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.unanswered = None

    def forget(self) -> None:
        """Remove all turns. The system message stays, and so does a question without an answer."""
        self.turns.clear()

    def take_last_question(self) -> str | None:
        """Return the last question, None if there is none; remove its answer."""
        if self.unanswered is not None or not self.turns:
            return self.unanswered
        self.unanswered = self.turns.pop().question
        return self.unanswered

    def document(self, model: str) -> dict[str, object]:
        """Return what `/save` writes: `messages`, ready to send, and `stopped_answers`, indices into `messages`."""
        first = 2 if self.system is not None else 1
        stopped = [first + 2 * index for index, turn in enumerate(self.turns) if turn.stopped]
        return {"model": model, "messages": self._said(), "stopped_answers": stopped}

    def _said(self) -> list[dict[str, str]]:
        pairs = [] if self.system is None else [("system", self.system)]
        for turn in self.turns:
            pairs += [("user", turn.question), ("assistant", turn.answer)]
        return [{"role": role, "content": content} for role, content in pairs]


class Answer:
    """One answer as it arrives, and its timing. Created when its question is sent."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._first: float | None = None
        self._last = self._asked
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, piece: str) -> str:
        """Add a piece; return it with unpaired surrogates replaced, since these have no UTF-8."""
        self._pieces.append(self.think(piece))
        return self._pieces[-1]

    def think(self, piece: str) -> str:
        """Note the time of a piece that is not part of the answer; return it as `add` does."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last
        return piece.encode("utf-8", errors="replace").decode()

    def facts(self, usage: Mapping[str, Any] | None, finish_reason: str | None) -> str:
        """Return the line below an answer: tokens and speed, without what the server did not count."""
        return " · ".join([*_tokens(usage or {}, finish_reason), *self._speed(usage or {})])

    def _speed(self, usage: Mapping[str, Any]) -> list[str]:
        """Return the decode rate and the TTFT. The rate leaves out the first token, which prefill computes."""
        if self._first is None:
            return []
        num_tokens, seconds = usage.get("completion_tokens") or 0, self._last - self._first
        rate = [f"{(num_tokens - 1) / seconds:.1f} tokens/s"] if num_tokens > 1 and seconds > 0 else []
        return [*rate, f"TTFT {1000 * (self._first - self._asked):.0f} ms"]


def _tokens(usage: Mapping[str, Any], finish_reason: str | None) -> list[str]:
    if "completion_tokens" not in usage:
        return []
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return [
        f"{usage.get('prompt_tokens') or 0:,} prompt tokens ({cached:,} cached)",
        f"{usage['completion_tokens']:,} new" + (", cut: raise --max-tokens" if finish_reason == "length" else ""),
    ]


_STOPPED = "stopped; what came so far stays in the conversation, /retry asks again"
_STOPPED_EARLY = "stopped before the first token; /retry asks again"


@dataclass(frozen=True)
class ChatOptions:
    """The flags of `tandem chat`; None leaves the choice to the server."""

    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass
class Session:
    """One chat: the model, the conversation and the view."""

    ai: AI
    options: ChatOptions
    model: str
    models: list[str]
    """The models served at the last request for them."""
    view: View
    explain: Callable[[Exception], str]
    """Returns the sentence for an error."""
    is_interactive: bool
    """Ctrl-C stops the answer only, not the chat."""
    conversation: Conversation = field(default_factory=Conversation)
    num_failed: int = 0

    def ask(self, question: str) -> None:
        """Send a question, and show the answer as it arrives.

        The part of a stopped answer stays in the conversation. A question that failed, or was stopped before its first
        token, leaves the conversation and can be asked again.
        """
        self.conversation.unanswered = question
        answer = Answer()
        try:
            facts = self._stream(question, answer)
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
            self._stopped(question, answer)
        except TandemAPIError as error:
            self.view.end_answer("")
            self.fail(error, _remedy(error, bool(self.conversation.turns)))
        else:
            self.view.end_answer(facts)
            self.conversation.answered(Turn(question, answer.text))

    def fail(self, error: Exception, remedy: str = "") -> None:
        """Show an error; `remedy` if the error itself names none."""
        self.num_failed += 1
        self.view.error(self.explain(error), remedy)

    def _stream(self, question: str, answer: Answer) -> str:
        self.view.wait()
        with self.ai.run(self.model, self._inputs(question)) as stream:
            stream.on_thinking(lambda piece: self.view.thinking(answer.think(piece)))
            for piece in stream:
                self.view.piece(answer.add(piece))
        return answer.facts(stream.usage, stream.finish_reason)

    def _stopped(self, question: str, answer: Answer) -> None:
        if answer.text:
            self.conversation.answered(Turn(question, answer.text, stopped=True))
        self.view.end_answer(_STOPPED if answer.text else _STOPPED_EARLY)

    def _inputs(self, question: str) -> StreamedInputs:
        inputs: StreamedInputs = {"messages": self.conversation.messages(question), "stream": True}
        if self.options.temperature is not None:
            inputs["temperature"] = self.options.temperature
        if self.options.max_tokens is not None:
            inputs["max_tokens"] = self.options.max_tokens
        if self.options.seed is not None:
            inputs["seed"] = self.options.seed
        return inputs


def _remedy(error: TandemAPIError, has_history: bool) -> str:
    """Return what the user can do about a failed question; empty if the error itself names the remedy."""
    if "shorten the prompt" in error.message or "context length" in error.message:
        return "/reset forgets the conversation, /retry then asks again" if has_history else "ask something shorter"
    if isinstance(error, AuthenticationError):
        return "set TANDEM_TOKEN to a token that may use this model, and start again"
    if isinstance(error, NotFoundError):
        return "/model shows the models there are"
    if error.retry_after:
        return f"/retry asks again; the server asks to wait {error.retry_after:.0f} s"
    if isinstance(error, DeadlineExceededError):
        return "ask for less"
    passes = isinstance(error, TandemConnectionError) or error.status is None or error.status == 429
    return "/retry asks again" if passes or (error.status or 0) >= 500 else ""


HELP = """\
/reset         empty the conversation; the system message stays
/model         list the models served
/model NAME    choose another model; the conversation stays
/system        show the system message
/system TEXT   set it; /system - removes it
/retry         ask the last question again
/save FILE     write the conversation as JSON
/quit          leave, as Ctrl-D, /exit and /bye do

//text         send a message that begins with a slash
text\\          a line that ends with a backslash continues on the next line

Ctrl-C stops an answer; its text so far stays in the conversation. At the
prompt, Ctrl-C clears the line, and twice in a row it leaves. Arrow up finds earlier
messages, Ctrl-R searches them, Tab completes commands and models."""


class CannotDo(ValueError):
    """A command cannot be executed; the message gives the reason and the remedy."""


class Leave(Exception):
    """The user leaves the chat."""


class Commands:
    """The commands of one chat."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._saved: set[Path] = set()
        self._by_name: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/reset": self._reset,
            "/model": self._model,
            "/system": self._system,
            "/retry": self._retry,
            "/save": self._save,
            "/quit": self._quit,
            "/exit": self._quit,
            "/bye": self._quit,
        }

    def execute(self, line: str) -> None:
        """Execute the command in `line`. Raises CannotDo, TandemAPIError or Leave."""
        name, words = [*line.split(maxsplit=1), ""][:2]
        if name not in self._by_name:
            raise CannotDo(f"there is no command {name}; /help lists them, and /{name} sends it as a message")
        self._by_name[name](words.strip())

    def completions(self, line: str) -> list[str]:
        """Return the completions of the last word of `line`."""
        first, *rest = line.split(" ")
        if not rest:
            return [f"{name} " for name in self._by_name if first and name.startswith(first)]
        return [name for name in self._session.models if first == "/model" and name.startswith(rest[-1])]

    def _help(self, words: str) -> None:
        self._session.view.show(HELP)

    def _reset(self, words: str) -> None:
        self._session.conversation.forget()
        self._session.view.note("the conversation is empty")

    def _model(self, name: str) -> None:
        session = self._session
        session.models = session.ai.models()
        if not name:
            session.view.show("\n".join(f"{'*' if each == session.model else ' '} {each}" for each in session.models))
        else:
            session.model = served(name, session.models)
            session.view.note(f"{session.model} answers from now on")

    def _system(self, text: str) -> None:
        conversation, view = self._session.conversation, self._session.view
        if not text:
            view.show(conversation.system or "no system message; /system TEXT sets one")
        else:
            conversation.system = None if text == "-" else text
            view.note("the system message is " + ("removed" if text == "-" else "set"))

    def _retry(self, words: str) -> None:
        question = self._session.conversation.take_last_question()
        if question is None:
            raise CannotDo("there is no question yet to ask again")
        self._session.ask(question)

    def _save(self, name: str) -> None:
        if not name:
            raise CannotDo("/save needs the name of a file: /save chat.json")
        path = Path(name).expanduser()
        text = json.dumps(self._session.conversation.document(self._session.model), indent=2, ensure_ascii=False)
        try:
            # A file that this chat did not write is not overwritten.
            with path.open("w" if path.resolve() in self._saved else "x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError as error:
            raise CannotDo(f"{name} exists already; name a new file") from error
        except OSError as error:
            raise CannotDo(f"cannot write {name}: {error.strerror}") from error
        self._saved.add(path.resolve())
        self._session.view.note(f"saved to {path}")

    def _quit(self, words: str) -> None:
        raise Leave


def served(name: str, models: list[str]) -> str:
    """Return `name` if it is one of `models`; else raises CannotDo with their names."""
    if name not in models:
        raise CannotDo(f"no model {name} is served here; there is {', '.join(models) or 'none yet'}")
    return name
