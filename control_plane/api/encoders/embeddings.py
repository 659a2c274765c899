"""The body of OpenAI's endpoint /v1/embeddings. Plain code: it runs in text processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from control_plane.api.encoders.fields import HARMLESS, check_lengths, check_not_empty
from control_plane.api.http.body import Body, check, parse_object, refuse_extras
from control_plane.api.http.bounds import MAX_EMBEDDED_TEXTS, MAX_MODEL_CHARACTERS, MAX_PROMPT_TOKENS
from control_plane.generation import EncoderInput, ModelFacts, ModelTask, TokenIds
from control_plane.text.prepared import Asked, EncodedForm, EncoderBody, PreparedTexts, TextJob
from control_plane.text.request import check_token_ids
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import InvalidRequest

Text = str | tuple[int, ...]


def _texts(value: Any) -> list[Text]:
    """Accept text, token ids, or a list of either: OpenAI's four forms of an input."""
    texts = value if isinstance(value, list) and not _is_token_ids(value) else [value]
    if len(texts) > MAX_EMBEDDED_TEXTS:
        raise ValueError(f"has {len(texts):,} entries, the maximum is {MAX_EMBEDDED_TEXTS:,}; send fewer")
    if not texts or not all(isinstance(text, str) or _is_token_ids(text) for text in texts):
        raise ValueError("must be a string, a list of token ids, or a non-empty list of strings or lists of token ids")
    longest = max((len(text) for text in texts if isinstance(text, list)), default=0)
    if longest > MAX_PROMPT_TOKENS:
        raise ValueError(f"has {longest:,} token ids, the maximum is {MAX_PROMPT_TOKENS:,}; send fewer")
    return [text if isinstance(text, str) else tuple(text) for text in texts]


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_PROMPT_TOKENS)]
_String = Annotated[str, Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_EMBEDDED_TEXTS)
Inputs = _String | _Ids | Annotated[list[_String], _Several] | Annotated[list[_Ids], _Several]


class EmbeddingsBody(Body):
    harmless: ClassVar[frozenset[str]] = HARMLESS
    remedies: ClassVar[dict[str, str]] = {}

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)]
    input: Annotated[list[Text], BeforeValidator(_texts, json_schema_input_type=Inputs)]
    """A text, some texts, or either as token ids; 2,048 at most. A text that the model cannot read whole is refused."""
    encoding_format: Annotated[str, Field(json_schema_extra={"enum": ["float", "base64"]})] | None = None
    """float: lists of numbers; base64: the bytes of float32 numbers, little-endian."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Cut each embedding to so many dimensions, and give it the length 1 again: for models trained for that."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_PROMPT_TOKENS)] | None = None
    """vLLM's field: cut a text to its first so many tokens; -1: to what the model reads."""

    def checked(self, *, strict: bool) -> EmbeddingsBody:
        refuse_extras(self, strict=strict)
        if self.encoding_format not in (None, "float", "base64"):
            raise InvalidRequest(
                f"encoding_format is {self.encoding_format[:60]!r}; send float or base64", field="encoding_format"
            )
        return self


@dataclass(frozen=True)
class Embeddings(EncoderBody):
    body: EmbeddingsBody

    @property
    def asked(self) -> Asked:
        return Asked(self.body.model, "embeddings")

    @property
    def tasks(self) -> tuple[ModelTask, ...]:
        return ("text-embedding",)

    def texts(self, model: ModelFacts, tokenizer: TextTokenizer) -> PreparedTexts:
        body, most = self.body, _max_tokens(self.body, model)
        check_not_empty([text if isinstance(text, str) else "ids" for text in body.input], "input")
        inputs = tuple(_encoded(text, model, tokenizer, most) for text in body.input)
        check_lengths(inputs, model, "input")
        num_values = model.encoder.num_values if model.encoder is not None else 0
        if body.dimensions is not None and body.dimensions > num_values:
            raise InvalidRequest(
                f"dimensions is {body.dimensions:,}, {model.model_id} makes {num_values:,}; send fewer, or none",
                field="dimensions",
            )
        is_base64 = body.encoding_format == "base64"
        form = EncodedForm("embeddings", body.model, as_base64=is_base64, num_dimensions=body.dimensions)
        return PreparedTexts(inputs, form)


def parse(job: TextJob, raw: bytes) -> Embeddings:
    """Check a body as far as that is possible without its model. Raise InvalidRequest."""
    return Embeddings(check(EmbeddingsBody, parse_object(raw)).checked(strict=job.strict_fields))


def _max_tokens(body: EmbeddingsBody, model: ModelFacts) -> int | None:
    """Return to how many tokens a text is cut; None: it is not."""
    asked = body.truncate_prompt_tokens
    return model.context_length if asked == -1 else asked or None


def _encoded(text: Text, model: ModelFacts, tokenizer: TextTokenizer, max_tokens: int | None) -> EncoderInput:
    if isinstance(text, str):
        return tokenizer.encode_texts(text, max_tokens=max_tokens)
    check_token_ids("input", text, model)
    return EncoderInput(TokenIds(text[:max_tokens]).packed())
