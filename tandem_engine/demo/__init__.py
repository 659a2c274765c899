"""Which model is built in, and where its packaged checkpoint lies. Imports nothing heavy."""

from pathlib import Path

MODEL_ID = "@tandem/demo"
"""The name under which `tandem up` serves this model when no other is asked for."""


def checkpoint_path() -> Path:
    """Return the folder that `AutoTokenizer` and `AutoModelForCausalLM` load the built-in model from."""
    return Path(__file__).parent / "checkpoint"
