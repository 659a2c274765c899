"""openai: a chat, a stream, structured output and the list of models."""

import os

import openai

client = openai.OpenAI(base_url=os.environ["TANDEM_URL"] + "/v1", api_key="none", max_retries=0)
model = os.environ["TANDEM_MODEL"]
messages = [{"role": "user", "content": "What is 17 + 25?"}]
assert model in [each.id for each in client.models.list()]
assert client.models.retrieve(model).id == model
answer = client.chat.completions.create(
    model=model, messages=messages, max_completion_tokens=16, temperature=0, user="me", store=False, logprobs=True,
    top_logprobs=2, metadata={"a": "b"}, prompt_cache_key="k", safety_identifier="s", service_tier="auto",
    reasoning_effort="low",
)  # fmt: skip
assert answer.choices[0].message.content and answer.choices[0].logprobs.content
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True}
)
assert list(stream)[-1].usage.completion_tokens > 0
completion = client.completions.create(model=model, prompt="Once upon", max_tokens=8, logprobs=1, echo=True)
assert completion.choices[0].text.startswith("Once upon")
