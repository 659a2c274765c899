"""How does `tandem chat` go on, from its opening line to Ctrl-D?"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

from rich.console import Console

from tandem_client import AI, TandemAPIError
from tandem_client.cli.chat_commands import CannotDo, Commands, Leave, served
from tandem_client.cli.chat_conversation import Conversation
from tandem_client.cli.chat_history import History, history_path
from tandem_client.cli.chat_lines import Lines, PlainLines, TerminalLines
from tandem_client.cli.chat_session import ChatOptions, Session
from tandem_client.cli.chat_view import PlainView, TerminalView, View
from tandem_client.cli.run import default_model


def chat(ai: AI, options: ChatOptions, explain: Callable[[Exception], str]) -> int:
    """Chat until the user leaves or the input ends; return the exit code: 1 if a script's question failed.

    `explain` says what an error means. Raises TandemAPIError or ValueError where a chat cannot begin.
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
    """Take messages until there are none any more, or two Ctrl-C with nothing in between."""
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
        commands.follow(message)
    except (CannotDo, TandemAPIError) as error:
        session.fail(error)


def _allow_any_bytes() -> None:
    """Let bytes that are no text, and text that the terminal cannot show, be marks of themselves and not the end."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
