"""How is a question asked in a chat, and what if it goes wrong?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_client import AI, AuthenticationError, NotFoundError, TandemAPIError, TandemConnectionError
from tandem_client.cli.chat_answer import Answer
from tandem_client.cli.chat_conversation import Conversation, Turn
from tandem_client.cli.chat_view import View
from tandem_client.inputs import StreamedInputs

_STOPPED = "stopped; what came so far stays in the conversation, /retry asks again"
_STOPPED_EARLY = "stopped before the first token; /retry asks again"


@dataclass(frozen=True)
class ChatOptions:
    """What the user asked of `tandem chat`; None leaves a choice to the server."""

    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass
class Session:
    """One chat: with whom, what was said, and where it shows."""

    ai: AI
    options: ChatOptions
    model: str
    models: list[str]
    """The models served when they were last asked for."""
    view: View
    explain: Callable[[Exception], str]
    """Says in a sentence what an error means."""
    is_interactive: bool
    """Ctrl-C stops an answer, and not the chat."""
    conversation: Conversation = field(default_factory=Conversation)
    num_failed: int = 0

    def ask(self, question: str) -> None:
        """Ask, and show the answer as it comes.

        An answer that the user stops stays, as far as it came; a question that failed, or was stopped before its first
        token, is out of the conversation and can be asked again.
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
        """Show an error, and what helps where it does not say so itself."""
        self.num_failed += 1
        self.view.error(self.explain(error), remedy)

    def _stream(self, question: str, answer: Answer) -> str:
        self.view.wait()
        with self.ai.run(self.model, self._inputs(question)) as stream:
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
    """Return what the user can do about a failed question; empty where the error itself says all there is."""
    if "shorten the prompt" in error.message or "context length" in error.message:
        return "/reset forgets the conversation, /retry then asks again" if has_history else "ask something shorter"
    if isinstance(error, AuthenticationError):
        return "set TANDEM_TOKEN to a token that may use this model, and start again"
    if isinstance(error, NotFoundError):
        return "/model shows the models there are"
    if error.retry_after:
        return f"/retry asks again; the server asks to wait {error.retry_after:.0f} s"
    passes = isinstance(error, TandemConnectionError) or error.status is None or error.status in (408, 429)
    return "/retry asks again" if passes or (error.status or 0) >= 500 else ""
