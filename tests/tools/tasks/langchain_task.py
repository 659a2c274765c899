"""langchain-openai: a chat, a stream, tools, structured output."""

import os

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Sum(BaseModel):
    """A sum of two numbers."""

    result: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


chat = ChatOpenAI(
    model=os.environ["TANDEM_MODEL"],
    base_url=os.environ["TANDEM_URL"] + "/v1",
    api_key="none",
    max_retries=0,
    max_tokens=48,
    temperature=0,
)
assert chat.invoke("What is 17 + 25?").content
assert "".join(str(chunk.content) for chunk in chat.stream("Tell me a story."))
assert chat.bind_tools([add], tool_choice="add").invoke("What is 17 + 25?").tool_calls[0]["name"] == "add"
assert isinstance(chat.with_structured_output(Sum).invoke("What is 17 + 25?"), Sum)
assert chat.get_num_tokens_from_messages is not None
