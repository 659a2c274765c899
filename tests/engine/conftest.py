"""Which small real models do the engine's tests run?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from engine.assembly import AssembledEngine, assemble
from engine.core import EngineCore
from engine.messages import AddRequest, Refused, RequestOutput
from engine.scheduling.sampling_params import SamplingParams
from engine.settings import EngineConfig

VOCAB_SIZE = 320
WINDOW = 16
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "mixtral": lambda: MixtralConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "gemma2": lambda: Gemma2Config(**_SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16),
}

MakeCheckpoint = Callable[[str], Path]
MakeEngine = Callable[..., AssembledEngine]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Return the folder of a small random model of that kind, with a tokenizer; made once per session."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("checkpoints") / f"tiny-{kind}"
            torch.manual_seed(9)
            auto: Any = AutoModelForCausalLM
            auto.from_config(CONFIGS[kind](), dtype=torch.float32).save_pretrained(folder)
            _byte_level_tokenizer().save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return make


@pytest.fixture(scope="session")
def make_engine(make_checkpoint: MakeCheckpoint) -> MakeEngine:
    """Assemble an engine in this process; keywords are EngineConfig's."""

    def make(kind: str, **settings: Any) -> AssembledEngine:
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kv_blocks": 128, "num_threads": 1} | settings
        config = EngineConfig(model=str(make_checkpoint(kind)), device="cpu", dtype="float32", **values)
        return assemble(config, lambda stage, fraction: None)

    return make


@pytest.fixture(scope="session")
def drain() -> Callable[[EngineCore], list[RequestOutput]]:
    """Step until there is no work, and return every output."""

    def run(core: EngineCore) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while core.has_work():
            outputs += core.step().outputs
        return outputs

    return run


Generate = Callable[[EngineCore, Iterable[tuple[Sequence[int], SamplingParams]]], list[list[int]]]


@pytest.fixture(scope="session")
def generate(drain: Callable[[EngineCore], list[RequestOutput]]) -> Generate:
    """Run requests side by side and return the answer of each."""

    def run(core: EngineCore, asks: Iterable[tuple[Sequence[int], SamplingParams]]) -> list[list[int]]:
        answers: dict[str, list[int]] = {}
        for index, (prompt, sampling) in enumerate(asks):
            answers[str(index)] = []
            answer = core.handle(AddRequest(str(index), list(prompt), len(prompt), sampling))
            assert not any(isinstance(event, Refused) for event in answer), answer
        for output in drain(core):
            answers[output.request_id] += output.token_ids
        return list(answers.values())

    return run


def _byte_level_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 4], trainer)
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
