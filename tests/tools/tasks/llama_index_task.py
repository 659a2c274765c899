"""llama-index: a completion, a chat, a stream."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=os.environ["TANDEM_MODEL"],
    api_base=os.environ["TANDEM_URL"] + "/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=32,
    max_retries=0,
)
assert llm.complete("What is 17 + 25?").text
question = [ChatMessage(role="user", content="What is 17 + 25?")]
assert llm.chat(question).message.content
assert [each.delta for each in llm.stream_chat(question)]
