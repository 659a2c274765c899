"""How does a Python program call Tandem? Start one with `tandem up` first."""

from tandem_client import AI

ai = AI()
for token in ai.run("@tandem/demo", {"prompt": "Once upon a time", "stream": True}):
    print(token, end="", flush=True)
print()
