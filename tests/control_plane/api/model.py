"""The small model that the API tests serve."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from control_plane.fleet.model_catalog import adapter_named
from control_plane.generation import ModelDescription
from tandem_runtime.errors import ModelNotFound

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today? I am fine, thank you.",
    "Once upon a time there was a small model that told stories to everyone who would listen.",
    "Ein Vogel wollte Hochzeit machen in dem grünen Walde. 你好，世界！ Привет, мир! 😀",
]


@lru_cache(maxsize=1)
def byte_level_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on a few sentences: <s>, </s>, ChatML's two, and <think> as an ordinary added token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def description(**changes: object) -> ModelDescription:
    tokenizer = byte_level_tokenizer()
    values: dict[str, object] = {
        "model_id": "@tandem/demo",
        "aliases": ("demo",),
        "context_length": 2048,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_ids": (1, 3),
        "chat_template": CHATML,
        "generation_defaults": {},
        "identity": "ab" * 16,
        "fingerprint": "ab" * 16,
        "numerics_class": "cpu-fp32",
        "created_unix_seconds": 1_763_000_000,
        "architecture": "LlamaForCausalLM",
        "num_parameters": 8_000_000,
        "tokenizer_json": tokenizer.to_str().encode(),
        "tokenizer_config": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    }
    return ModelDescription(**(values | changes))  # type: ignore[arg-type]


def ids_of(text: str) -> list[int]:
    return list(byte_level_tokenizer().encode(text, add_special_tokens=False).ids)


class OneModel:
    """A catalogue of one model."""

    def __init__(self, model: ModelDescription) -> None:
        self.model = model

    async def get(self, name: str) -> ModelDescription:
        base, colon, adapter = name.rpartition(":")
        if colon and base in (self.model.model_id, *self.model.aliases):
            return replace(self.model, adapter=adapter_named(adapter, self.model.model_id, self.model.adapters))
        if name not in (self.model.model_id, *self.model.aliases):
            raise ModelNotFound(f"no model {name!r}; served here: {self.model.model_id}", field="model")
        return self.model

    def list(self) -> list[ModelDescription]:
        return [self.model]
