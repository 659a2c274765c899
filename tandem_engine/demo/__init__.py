"""Names the built-in model and the folder of its packaged checkpoint. Imports nothing heavy."""

from pathlib import Path

MODEL_ID = "@tandem/demo"
"""The model that `tandem up` serves by default."""


def checkpoint_path() -> Path:
    """Return the folder that `AutoTokenizer` and `AutoModelForCausalLM` load the built-in model from."""
    return Path(__file__).parent / "checkpoint"
