"""litellm: a chat and a stream, as OpenAI's and as vLLM's server; a completion."""

import os

import litellm

messages = [{"role": "user", "content": "What is 17 + 25?"}]
base = os.environ["TANDEM_URL"] + "/v1"
for provider in ("openai", "hosted_vllm"):
    common = {
        "model": f"{provider}/{os.environ['TANDEM_MODEL']}",
        "api_base": base,
        "api_key": "none",
        "max_tokens": 16,
    }
    answer = litellm.completion(messages=messages, user="me", metadata={"a": "b"}, **common)
    assert answer.choices[0].message.content and answer.usage.completion_tokens
    stream = litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
text = litellm.text_completion(
    model=f"text-completion-openai/{os.environ['TANDEM_MODEL']}", prompt="Once upon", api_base=base, api_key="none",
    max_tokens=8,
)  # fmt: skip
assert text.choices[0].text
