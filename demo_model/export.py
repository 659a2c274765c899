"""Packages a run's averaged weights as a checkpoint folder: `python -m demo_model.export --from runs/demo`."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from demo_model.encoded import SPECIAL_TOKEN_IDS
from demo_model.model import ModelShape
from demo_model.run_folder import RunFolder, TrainingState, write_atomically
from demo_model.tokenizer import load_tokenizer, write_tokenizer_files
from demo_model.train import TrainingSettings
from tandem_engine.demo import checkpoint_path

MAX_WEIGHT_BYTES = 25_000_000
_END_OF_TEXT_ID, _, _MESSAGE_END_ID = SPECIAL_TOKEN_IDS


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.norm_epsilon,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": _MESSAGE_END_ID,
        "pad_token_id": _END_OF_TEXT_ID,
        "dtype": "bfloat16",
    }


def _generation_config() -> dict[str, Any]:
    """Chats end with <|im_end|>, plain text with <|endoftext|>. Greedy by default: the answers are exact."""
    return {
        "eos_token_id": [_MESSAGE_END_ID, _END_OF_TEXT_ID],
        "pad_token_id": _END_OF_TEXT_ID,
        "do_sample": False,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def _write_weights(path: Path, state: TrainingState, *, averaged: bool) -> None:
    source = state.average if averaged else state.weights
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in source.items()}
    partial = path.with_suffix(".partial")
    save_file(weights, str(partial), metadata={"format": "pt"})
    num_bytes = partial.stat().st_size
    if num_bytes > MAX_WEIGHT_BYTES:
        partial.unlink()
        raise SystemExit(f"the weights take {num_bytes:,} bytes, the package {MAX_WEIGHT_BYTES:,}; use a smaller shape")
    partial.chmod(0o644)  # safetensors writes files that only the owner can read
    partial.replace(path)


def export(run: Path, folder: Path, *, averaged: bool = True) -> int:
    """Write the newest state of a run as a package that transformers loads; return the state's step."""
    source = RunFolder(run)
    settings = TrainingSettings.from_dict(source.load_settings())
    state = source.load_state()
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder / "model.safetensors", state, averaged=averaged)
    _write_json(folder / "config.json", _config(settings.shape))
    _write_json(folder / "generation_config.json", _generation_config())
    write_tokenizer_files(load_tokenizer(source.tokenizer_path), folder, settings.shape.max_positions)
    return state.step


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m demo_model.export", description=__doc__)
    parser.add_argument("--from", dest="run", type=Path, default=Path("runs/demo"), help="the run's folder")
    parser.add_argument("--to", type=Path, default=checkpoint_path(), help="the package's folder")
    parser.add_argument("--last", action="store_true", help="the last weights instead of their average")
    arguments = parser.parse_args()
    step = export(arguments.run, arguments.to, averaged=not arguments.last)
    print(f"packaged step {step} of {arguments.run} in {arguments.to}")


if __name__ == "__main__":
    main()
