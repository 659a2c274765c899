"""Calls Tandem with its Python client; start Tandem with `tandem up` first."""

from tandem_client import AI

ai = AI()
for token in ai.run("@tandem/demo", {"prompt": "What is a KV cache?", "stream": True}):
    print(token, end="", flush=True)
print()
