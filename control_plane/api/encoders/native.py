"""Workers AI's inputs of encoders: of `AI.run` and /ai/run. Plain code: it runs in text processes.

The fields tell what is asked, and the model's task tells what is answered:

    text              embeddings of a text or of some texts; of a classifier: the classes of a text
    query, contexts   a score for each context: of a ranking model, or of an embedding model the cosine (bge-m3)
    contexts          embeddings (bge-m3)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from control_plane.api.encoders.fields import HARMLESS, check_lengths, check_not_empty, encoded_pairs
from control_plane.api.http.body import Body, at_most, check, refuse_extras
from control_plane.api.http.bounds import MAX_NATIVE_TEXTS
from control_plane.generation import ModelFacts, ModelTask
from control_plane.text.prepared import Asked, EncodedForm, EncoderBody, Operation, PreparedTexts
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import InvalidRequest

_FIELDS = frozenset({"text", "query", "contexts"})
_OF_TEXT = frozenset({"prompt", "messages"})


class Context(Body):
    text: str


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Texts = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_NATIVE_TEXTS, fail_fast=True),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]


class EncoderInputs(Body):
    """Workers AI's inputs of embedding models, rankers and classifiers."""

    harmless: ClassVar[frozenset[str]] = HARMLESS

    text: _Texts | None = None
    """A text, or at most 100. A text that is too long is cut, unless truncate_inputs is false."""
    query: Annotated[str, Field(min_length=1)] | None = None
    contexts: Annotated[list[Context], at_most(MAX_NATIVE_TEXTS), Field(min_length=1)] | None = None
    """Texts that are scored for the query, or embedded without one; at most 100."""
    pooling: Annotated[str, Field(json_schema_extra={"enum": ["mean", "cls"]})] | None = None
    """Of embeddings of `text`: mean by default, as at Workers AI."""
    truncate_inputs: bool | None = None
    """Whether texts that are too long are cut; an embedding model refuses contexts that are too long without it."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Of scores: return only so many of the best."""

    def checked(self, *, strict: bool) -> EncoderInputs:
        refuse_extras(self, strict=strict)
        if self.pooling not in (None, "mean", "cls"):
            raise InvalidRequest(f"pooling is {self.pooling[:60]!r}; send mean or cls", field="pooling")
        if (self.text is None) == (self.contexts is None):
            raise InvalidRequest("send text, or contexts with or without a query", field="text")
        if self.query is not None and self.contexts is None:
            raise InvalidRequest("query needs contexts, which it is compared with; send them", field="contexts")
        return self


def is_for_encoders(inputs: Any) -> bool:
    """Return whether a run's inputs are an encoder's: no field is both theirs and a text generation's."""
    return isinstance(inputs, Mapping) and not _OF_TEXT & inputs.keys() and bool(_FIELDS & inputs.keys())


@dataclass(frozen=True)
class EncoderRun(EncoderBody):
    model: str
    body: EncoderInputs
    reject_if_busy: bool
    timeout_seconds: float | None

    @property
    def asked(self) -> Asked:
        operation: Operation = "embeddings" if self.body.query is None else "rerank"
        return Asked(self.model, operation, reject_if_busy=self.reject_if_busy, timeout_seconds=self.timeout_seconds)

    @property
    def tasks(self) -> tuple[ModelTask, ...]:
        if self.body.query is not None:
            return ("text-ranking", "text-embedding")
        return ("text-embedding",) if self.body.text is None else ("text-embedding", "text-classification")

    def texts(self, model: ModelFacts, tokenizer: TextTokenizer) -> PreparedTexts:
        if model.task == "text-ranking":
            return self._ranked(model, tokenizer)
        if model.task == "text-classification":
            return self._classified(model, tokenizer)
        return self._embedded(model, tokenizer)

    def _ranked(self, model: ModelFacts, tokenizer: TextTokenizer) -> PreparedTexts:
        assert self.body.query is not None, "a ranking model takes no other inputs"
        texts = self._contexts()
        inputs = encoded_pairs(
            self.body.query, texts, model, tokenizer, max_tokens=self._max_tokens(model, is_cut=True)
        )
        check_lengths(inputs, model, "contexts")
        return PreparedTexts(inputs, EncodedForm("native_scores", self.model, most=self.body.top_k))

    def _classified(self, model: ModelFacts, tokenizer: TextTokenizer) -> PreparedTexts:
        texts = self.body.text or []
        if len(texts) != 1:
            raise InvalidRequest(f"text has {len(texts)} entries, a classifier takes one; send a string", field="text")
        return PreparedTexts(self._encoded(texts, model, tokenizer, "text"), EncodedForm("native_classes", self.model))

    def _embedded(self, model: ModelFacts, tokenizer: TextTokenizer) -> PreparedTexts:
        body = self.body
        if body.text is not None:
            pooling = body.pooling or _default_pooling(model)
            form = EncodedForm("native_embeddings", self.model, pooling=pooling)
            return PreparedTexts(self._encoded(body.text, model, tokenizer, "text"), form, pooling)
        query = [] if body.query is None else [body.query]
        inputs = self._encoded([*query, *self._contexts()], model, tokenizer, "contexts")
        own = body.pooling or ""
        if query:
            return PreparedTexts(inputs, EncodedForm("native_scores", self.model, most=body.top_k), own)
        form = EncodedForm("native_embeddings", self.model, pooling=own or _own_pooling(model), is_response=True)
        return PreparedTexts(inputs, form, own)

    def _encoded(
        self, texts: Sequence[str], model: ModelFacts, tokenizer: TextTokenizer, field: str
    ) -> tuple[Any, ...]:
        check_not_empty(texts, field)
        most = self._max_tokens(model, is_cut=field == "text")
        inputs = tuple(tokenizer.encode_texts(text, max_tokens=most, field=field) for text in texts)
        check_lengths(inputs, model, field)
        return inputs

    def _max_tokens(self, model: ModelFacts, *, is_cut: bool) -> int | None:
        """Return to how many tokens a text is cut; `is_cut`: unless the body says otherwise."""
        asked = self.body.truncate_inputs
        return model.context_length if (is_cut if asked is None else asked) else None

    def _contexts(self) -> list[str]:
        texts = [context.text for context in self.body.contexts or ()]
        check_not_empty(texts, "contexts")
        return texts


def parse_run(
    model: str, inputs: Mapping[str, Any], reject_if_busy: bool, timeout_seconds: float | None, *, strict: bool
) -> EncoderRun:
    """Check a run's inputs as far as that is possible without the model. Raise InvalidRequest."""
    body = check(EncoderInputs, inputs).checked(strict=strict)
    return EncoderRun(model, body, reject_if_busy, timeout_seconds)


def _own_pooling(model: ModelFacts) -> str:
    return model.encoder.pooling if model.encoder is not None else ""


def _default_pooling(model: ModelFacts) -> str:
    """Return "mean", Workers AI's default, unless the model can only be pooled by its last token."""
    return "last" if _own_pooling(model) == "last" else "mean"
