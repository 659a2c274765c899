"""The body of /v1/rerank, in the form of Cohere and Jina. Plain code: it runs in text processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from control_plane.api.encoders.fields import HARMLESS, check_lengths, check_not_empty, encoded_pairs
from control_plane.api.http.body import Body, at_most, check, parse_object, refuse_extras
from control_plane.api.http.bounds import MAX_DOCUMENTS, MAX_MODEL_CHARACTERS
from control_plane.generation import ModelFacts, ModelTask
from control_plane.text.prepared import Asked, EncodedForm, EncoderBody, PreparedTexts, TextJob
from control_plane.text.tokenizer import TextTokenizer


class Document(Body):
    text: str


class RerankBody(Body):
    harmless: ClassVar[frozenset[str]] = HARMLESS

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)]
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], at_most(MAX_DOCUMENTS), Field(min_length=1, max_length=MAX_DOCUMENTS)]
    """Texts, or objects with `text`; 1,000 at most."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    """Return only so many of the best."""
    return_documents: bool | None = None
    """Return also the texts."""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Cut query and document together to so many tokens; at most, and by default, what the model reads."""

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


@dataclass(frozen=True)
class Rerank(EncoderBody):
    body: RerankBody

    @property
    def asked(self) -> Asked:
        return Asked(self.body.model, "rerank")

    @property
    def tasks(self) -> tuple[ModelTask, ...]:
        return ("text-ranking",)

    def texts(self, model: ModelFacts, tokenizer: TextTokenizer) -> PreparedTexts:
        body, texts = self.body, self.body.texts
        check_not_empty(texts, "documents")
        most = min(body.max_tokens_per_doc or model.context_length, model.context_length)
        inputs = encoded_pairs(body.query, texts, model, tokenizer, max_tokens=most)
        check_lengths(inputs, model, "documents")
        documents = tuple(texts) if body.return_documents else None
        return PreparedTexts(inputs, EncodedForm("rerank", body.model, most=body.top_n, documents=documents))


def parse(job: TextJob, raw: bytes) -> Rerank:
    """Check a body as far as that is possible without its model. Raise InvalidRequest."""
    body = check(RerankBody, parse_object(raw))
    refuse_extras(body, strict=job.strict_fields)
    return Rerank(body)
