"""What has been said in a chat?"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Turn:
    """A question and its answer; `stopped`: the user had enough before the answer was at its end."""

    question: str
    answer: str
    stopped: bool = False


@dataclass
class Conversation:
    """What the model is told with each question, and the last question that got no answer."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    unanswered: str | None = None

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return everything said so far, then `question`."""
        return [*self._said(), {"role": "user", "content": question}]

    def answered(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.unanswered = None

    def forget(self) -> None:
        """Begin anew. The system message stays, and so does a question without an answer: it can be asked again."""
        self.turns.clear()

    def take_last_question(self) -> str | None:
        """Return what to ask again, None if nothing was asked; an answer it already has is forgotten."""
        if self.unanswered is not None or not self.turns:
            return self.unanswered
        self.unanswered = self.turns.pop().question
        return self.unanswered

    def document(self, model: str) -> dict[str, object]:
        """Return what `/save` writes: `messages` can be sent as they are, `stopped_answers` are places in them."""
        first = 2 if self.system is not None else 1
        stopped = [first + 2 * index for index, turn in enumerate(self.turns) if turn.stopped]
        return {"model": model, "messages": self._said(), "stopped_answers": stopped}

    def _said(self) -> list[dict[str, str]]:
        pairs = [] if self.system is None else [("system", self.system)]
        for turn in self.turns:
            pairs += [("user", turn.question), ("assistant", turn.answer)]
        return [{"role": role, "content": content} for role, content in pairs]
