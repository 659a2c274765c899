"""Which commands does a chat know, and what do they do?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tandem_client.cli.chat_session import Session

HELP = """\
/reset         forget the conversation; the system message stays
/model         list the models served
/model NAME    talk to another one; the conversation stays
/system        show the system message
/system TEXT   set it; /system - removes it
/retry         ask the last question again
/save FILE     write the conversation as JSON
/quit          leave, as Ctrl-D does

//text         send a message that begins with a slash
text\\          a line that ends with a backslash goes on in the next one

Ctrl-C stops an answer; what came so far stays in the conversation. At the
prompt it clears the line, and twice in a row it leaves. Arrow up finds earlier
messages, Ctrl-R searches them, Tab completes commands and models."""


class CannotDo(ValueError):
    """A command cannot be followed; the message says why and what can."""


class Leave(Exception):
    """The user has had enough."""


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
        }

    def follow(self, line: str) -> None:
        """Do what `line` says. Raises CannotDo, TandemAPIError or Leave."""
        name, words = [*line.split(maxsplit=1), ""][:2]
        if name not in self._by_name:
            raise CannotDo(f"there is no command {name}; /help lists them, and /{name} sends it as a message")
        self._by_name[name](words.strip())

    def completions(self, line: str) -> list[str]:
        """Return what the last word of `line` could become."""
        first, *rest = line.split(" ")
        if not rest:
            return [f"{name} " for name in self._by_name if first and name.startswith(first)]
        return [name for name in self._session.models if first == "/model" and name.startswith(rest[-1])]

    def _help(self, words: str) -> None:
        self._session.view.show(HELP)

    def _reset(self, words: str) -> None:
        self._session.conversation.forget()
        self._session.view.note("the conversation is forgotten")

    def _model(self, name: str) -> None:
        session = self._session
        session.models = session.ai.models()
        if not name:
            session.view.show("\n".join(f"{'*' if each == session.model else ' '} {each}" for each in session.models))
        else:
            session.model = served(name, session.models)
            session.view.note(f"{session.model} answers from here on")

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
            raise CannotDo("nothing has been asked yet that could be asked again")
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
            raise CannotDo(f"{name} is there already; name a new file") from error
        except OSError as error:
            raise CannotDo(f"cannot write {name}: {error.strerror}") from error
        self._saved.add(path.resolve())
        self._session.view.note(f"saved to {path}")

    def _quit(self, words: str) -> None:
        raise Leave


def served(name: str, models: list[str]) -> str:
    """Return `name` if it is one of `models`; raises CannotDo naming them."""
    if name not in models:
        raise CannotDo(f"no model {name} is served here; there is {', '.join(models) or 'none yet'}")
    return name
