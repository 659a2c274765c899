"""Calls Tandem with the OpenAI SDK; only the base URL differs."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("TANDEM_BASE_URL", "http://127.0.0.1:8642") + "/v1", api_key="unused")
stream = client.chat.completions.create(
    model="@tandem/demo",
    messages=[{"role": "user", "content": "Tell me a story"}],
    max_tokens=100,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
print()
