"""Shows in an answer which numerics class its tokens are of: the fingerprint of each chunk, and the seams at the end.

An answer whose tokens are all of the model's own class is written without this: nothing here runs per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import TypedDict

from control_plane.api.collected_choice import Answer
from control_plane.explain.class_seams import Run
from control_plane.generation import ModelDescription
from control_plane.text.choice import TextDelta

SeamObject = TypedDict(  # `from` is a keyword
    "SeamObject",
    {"choice": int, "position": int, "from": str, "to": str},
)
"""The tokens of a choice from `position` on (0 is its first token) are of another numerics class, and may differ from
those that the class before would have given. `from` and `to` are values of `system_fingerprint`."""


def system_fingerprint(model: ModelDescription) -> str:
    """Return a digest of weights and numerics class: while it is equal, the same request gives the same tokens."""
    return _fingerprint(model.fingerprint, model.numerics_class)


class AnswerClasses:
    """The numerics classes of one answer. Make this before the answer's first token is read."""

    def __init__(self, answer: Answer) -> None:
        self._model = answer.model
        self._histories = answer.histories
        self._num_choices = answer.num_choices // len(self._histories)
        """Of each prompt: choice c of prompt p is the answer's choice p * num_choices + c."""
        self._mixed = _Mark()
        for history in self._histories:
            history.classes.watch(self._model.numerics_class, self._mixed.set)  # not self's: self refers to the history

    @property
    def is_mixed(self) -> bool:
        """Whether a token is of another class than the model's."""
        return self._mixed.is_set

    def marked(self, batch: Iterator[TextDelta], mark: Callable[[str], None]) -> Iterator[TextDelta]:
        """Yield a batch; before each delta, call `mark` with the fingerprint of the class of its last token."""
        for delta in batch:
            mark(self._of_choice(delta.choice_index))
            yield delta

    @property
    def first(self) -> str:
        """The fingerprint of the answer's first token."""
        return self._named(self._histories[0].classes.at(0, 0))

    @property
    def seams(self) -> list[SeamObject]:
        """The seams in what the client has; [] for almost every answer."""
        return [
            {
                "choice": index * self._num_choices + seam.choice,
                "position": seam.position,
                "from": self._named(seam.before),
                "to": self._named(seam.after),
            }
            for index, history in enumerate(self._histories)
            for seam in history.seams
        ]

    def _of_choice(self, choice: int) -> str:
        """Return the fingerprint of the choice's last token that was read."""
        prompt, index = divmod(choice, self._num_choices)
        history = self._histories[prompt]
        return self._named(history.classes.at(index, history.choices[index].num_delivered))

    def _named(self, run: Run | None) -> str:
        if run is None or run.numerics_class == self._model.numerics_class:
            return system_fingerprint(self._model)
        return _fingerprint(run.fingerprint.digest.hex(), run.numerics_class)


class _Mark:
    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True


def _fingerprint(digest: str, numerics_class: str) -> str:
    return f"fp_{blake2b(f'{digest} {numerics_class}'.encode(), digest_size=6).hexdigest()}"
