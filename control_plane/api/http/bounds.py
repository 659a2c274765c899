"""Bounds on the requests of HTTP clients that are no settings; docs/operate/limits.md is made from this module.

A bound is far beyond what real clients send and far below what would delay others. Lists are bounded by their length,
texts by characters, JSON values that are passed on by the bytes of their JSON.
"""

from __future__ import annotations

from tandem_engine.grammar import MAX_GRAMMAR_CHARACTERS
from tandem_runtime.errors import InvalidRequest

# ------------------------------------------------------------------------------------------------------------- head

MAX_HEADERS = 256
"""Header lines of a request, or trailer lines: more are refused with 431."""
MAX_URL_BYTES = 16_384
"""Bytes of the request target as sent: more are refused with 414."""
MAX_PATH_CHARACTERS = 2_048
"""Characters of the decoded path: more are refused with 414."""
MAX_QUERY_BYTES = 8_192
"""Bytes of the query: more are refused with 414."""
MAX_TOKEN_CHARACTERS = 4_096
"""Characters of the headers Authorization and X-Auth-Key: more are refused with 400."""
MAX_SESSION_CHARACTERS = 256
"""Characters of the header x-session-affinity: more are refused with 400."""
MAX_ACCOUNT_CHARACTERS = 64
"""Characters of an account's name: more are refused with 400."""
MAX_MODEL_CHARACTERS = 256
"""Characters of a model's name: more are refused with 400."""
MAX_PIPELINED = 16
"""Requests that wait on one connection for the answer before: then the connection closes after the last of them."""
MAX_PER_PAGE = 1_000
"""Entries in a page of a list: more are refused with 400."""

# ------------------------------------------------------------------------------------------------------------- JSON

MAX_JSON_DEPTH = 128
"""Levels of lists and objects in a body: more are refused with 400. A level of a JSON Schema takes two or three."""
MAX_JSON_CONTAINERS = 131_072
"""Lists and objects in a body: more are refused with 400."""
MAX_IGNORED_BYTES = 65_536
"""Bytes of a field that is accepted without effect, such as metadata: more are refused with 400."""
MAX_SHOWN_CHARACTERS = 60
"""Characters of a caller's value or name in an error message: the rest is cut."""

# ------------------------------------------------------------------------------------------------------------ chats

MAX_MESSAGES = 8_192
"""Messages of a chat: more are refused with 400."""
MAX_PARTS = 1_024
"""Parts of a message's content: more are refused with 400."""
MAX_TOOL_CALLS = 256
"""Tool calls of one message: more are refused with 400."""
MAX_TOOL_CALLS_IN_ALL = 8_192
"""Tool calls of a chat: more are refused with 400."""
MAX_TOOLS = 128
"""Tools of a request, as at OpenAI: more are refused with 400."""
MAX_ARGUMENTS_BYTES = 262_144
"""Bytes of the arguments of one tool call: more are refused with 400."""
MAX_PARAMETERS_BYTES = 262_144
"""Bytes of the JSON Schema of one tool's arguments: more are refused with 400."""
MAX_DESCRIPTION_CHARACTERS = 65_536
"""Characters of a tool's description: more are refused with 400."""
MAX_NAME_CHARACTERS = 256
"""Characters of the name of a message's author or of a called tool: more are refused with 400."""
MAX_TEMPLATE_VARIABLES = 64
"""Entries in chat_template_kwargs: more are refused with 400."""
MAX_TEMPLATE_VARIABLES_BYTES = 65_536
"""Bytes of chat_template_kwargs as JSON: more are refused with 400."""
MAX_ID_CHARACTERS = 256
"""Characters of a tool call's id: more are refused with 400."""

# ------------------------------------------------------------------------------------------------------- generation

MAX_CHOICES = 128
"""Answers to one prompt (n), as at OpenAI: more are refused with 400."""
MAX_PROMPTS = 256
"""Prompts of a completion: more are refused with 400."""
MAX_PROMPT_TOKENS = 1_048_576
"""Token ids of a prompt that is sent as token ids: more are refused with 400."""
MAX_EMBEDDED_TEXTS = 2_048
"""Texts of a request for embeddings, as at OpenAI: more are refused with 400."""
MAX_DOCUMENTS = 1_000
"""Documents of a request for a ranking, as at Cohere: more are refused with 400."""
MAX_NATIVE_TEXTS = 100
"""Texts or contexts of one run of Workers AI's encoders, as there: more are refused with 400."""
MAX_STOP_STRINGS = 4
"""Stop strings, as at OpenAI: more are refused with 400."""
MAX_STOP_CHARACTERS = 1_024
"""Characters of one stop string: more are refused with 400."""
MAX_STOP_TOKEN_IDS = 1_024
"""Entries in stop_token_ids: more are refused with 400."""
MAX_LOGIT_BIASES = 4_096
"""Entries in logit_bias: more are refused with 400. OpenAI takes 1,024; each entry travels with the request."""
MAX_GUIDED_CHOICES = 16_384
"""Entries in guided_choice: more are refused with 400. The bound on the grammar is reached before."""
MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_CHARACTERS
"""Bytes of a JSON Schema for the answer, before it is written as a grammar: more are refused with 400."""
MAX_SALT_CHARACTERS = 256
"""Characters of cache_salt: more are refused with 400."""
MAX_SCOPES = 16
"""Entries in the scopes of a new token: more are refused with 400."""
MAX_TAGS = 5
"""Tags of a run, as at Cloudflare: more are refused with 400."""
MAX_TAG_CHARACTERS = 50
"""Characters of a tag, as at Cloudflare: more are refused with 400."""


def check_model_name(name: str) -> None:
    """Raise InvalidRequest if a model's name is longer than any model's."""
    if len(name) > MAX_MODEL_CHARACTERS:
        raise InvalidRequest(
            f"model has {len(name):,} characters, the maximum is {MAX_MODEL_CHARACTERS}; send a model's name",
            field="model",
        )
