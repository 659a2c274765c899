"""The Python client of Tandem.

from tandem_client import AI

ai = AI()
print(ai.run("@tandem/demo", {"prompt": "What is a KV cache?"})["response"])
for token in ai.run("@tandem/demo", {"prompt": "What is a KV cache?", "stream": True}):
    print(token, end="", flush=True)
"""

from tandem_client.ai import AI
from tandem_client.async_ai import AsyncAI
from tandem_client.errors import (
    AuthenticationError,
    DeadlineExceededError,
    NotFoundError,
    RateLimitError,
    StreamTruncated,
    TandemAPIError,
    TandemConnectionError,
    TandemTimeoutError,
)
from tandem_client.stream import AsyncTokenStream, TokenStream

__all__ = [
    "AI",
    "AsyncAI",
    "AsyncTokenStream",
    "AuthenticationError",
    "DeadlineExceededError",
    "NotFoundError",
    "RateLimitError",
    "StreamTruncated",
    "TandemAPIError",
    "TandemConnectionError",
    "TandemTimeoutError",
    "TokenStream",
]
