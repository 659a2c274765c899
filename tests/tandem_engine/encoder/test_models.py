"""Our encoders return what transformers' own classes return."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tandem_engine.encoder.batch import EncoderInput
from tandem_engine.encoder.messages import Pooling
from tests.tandem_engine.encoder import checkpoints
from tests.tandem_engine.encoder.loaded import assert_close, load, loaded, random_texts

FAMILIES = ["bert", "roberta", "xlm-roberta", "distilbert"]
LENGTHS = [1, 2, 17, 31, 64, checkpoints.NUM_POSITIONS]
POOLED: dict[Pooling, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda hidden: hidden.mean(0),
    "cls": lambda hidden: hidden[0],
    "last": lambda hidden: hidden[-1],
}
MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


def _run(model: Any, text: EncoderInput) -> Any:
    """Return transformers' output for one text, with token types where the model knows two."""
    arguments = {"input_ids": torch.from_numpy(text.token_ids.astype("int64")).unsqueeze(0)}
    if text.num_first_tokens and getattr(model.config, "type_vocab_size", 0) > 1:
        arguments["token_type_ids"] = (torch.arange(text.num_tokens) >= text.num_first_tokens).long().unsqueeze(0)
    with torch.inference_mode():
        return model(**arguments)


def _vectors(model: Any, texts: list[EncoderInput], pooling: Pooling) -> torch.Tensor:
    return torch.stack([POOLED[pooling](_run(model, text).last_hidden_state[0]) for text in texts])


def _logits(model: Any, texts: list[EncoderInput]) -> torch.Tensor:
    return torch.cat([_run(model, text).logits for text in texts])


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_bare_model_makes_embeddings_by_the_mean(kind: str, kernels: str, tmp_path: Path) -> None:
    model = checkpoints.make(kind, tmp_path)
    encoder = load(tmp_path, kernels)
    assert (encoder.info.task, encoder.info.pooling, encoder.info.is_normalized) == ("text-embedding", "mean", False)
    assert encoder.context_length == checkpoints.NUM_POSITIONS
    texts = random_texts(LENGTHS)
    assert_close(encoder.encode(texts), _vectors(model, texts, "mean"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_files_of_sentence_transformers_decide_the_pooling(mode: str, is_normalized: bool, tmp_path: Path) -> None:
    model = checkpoints.make("bert", tmp_path)
    checkpoints.write_sentence_files(tmp_path, mode, is_normalized=is_normalized, max_tokens=40)
    encoder = load(tmp_path)
    assert (encoder.info.pooling, encoder.context_length) == (MODES[mode], 40)
    texts = random_texts([1, 3, 40])
    vectors = _vectors(model, texts, MODES[mode])
    assert_close(encoder.encode(texts), functional.normalize(vectors) if is_normalized else vectors)


@pytest.mark.parametrize("pooling", POOLED)
def test_a_call_may_choose_the_pooling(pooling: Pooling, tmp_path: Path) -> None:
    model = checkpoints.make("bert", tmp_path)
    texts = random_texts([1, 3, 40], pooling=pooling)
    assert_close(load(tmp_path).encode(texts), _vectors(model, texts, pooling))


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_classifier_returns_probabilities_of_texts_and_pairs(kind: str, kernels: str, tmp_path: Path) -> None:
    model = checkpoints.make_with_head(kind, tmp_path, 5)
    encoder = load(tmp_path, kernels)
    assert encoder.info.task == "text-classification" and encoder.info.has_pairs
    assert encoder.info.labels == [f"class {index}" for index in range(5)]
    for texts in random_texts(LENGTHS), random_texts(LENGTHS, pairs=True):
        assert_close(encoder.encode(texts), _logits(model, texts).softmax(-1))


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_classifier_of_several_labels_at_once_returns_sigmoids(kind: str, tmp_path: Path) -> None:
    model = checkpoints.make_with_head(kind, tmp_path, 3, problem_type="multi_label_classification")
    texts = random_texts(LENGTHS)
    assert_close(load(tmp_path).encode(texts), _logits(model, texts).sigmoid())


@pytest.mark.parametrize("kind", FAMILIES)
def test_one_label_ranks_pairs_by_the_raw_logit(kind: str, tmp_path: Path) -> None:
    model = checkpoints.make_with_head(kind, tmp_path, 1)
    encoder = load(tmp_path)
    assert (encoder.info.task, encoder.info.num_values, encoder.info.labels) == ("text-ranking", 1, [])
    texts = random_texts(LENGTHS, pairs=True)
    assert_close(encoder.encode(texts), _logits(model, texts))


def test_the_second_text_of_a_pair_has_a_type_of_its_own(tmp_path: Path) -> None:
    checkpoints.make_with_head("bert", tmp_path, 1)
    encoder = load(tmp_path)
    alone, pair = random_texts([12])[0], random_texts([12], pairs=True)[0]
    assert encoder.encode([alone])[0] != encoder.encode([pair])[0]


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-causal"])
@pytest.mark.parametrize("mode", MODES)
def test_a_decoder_makes_embeddings(kind: str, mode: str, kernels: str, tmp_path: Path) -> None:
    model = checkpoints.make(kind, tmp_path)
    checkpoints.write_sentence_files(tmp_path, mode)
    inner = getattr(model, "model", model)
    texts = random_texts(LENGTHS)
    expected = functional.normalize(_vectors(inner, texts, MODES[mode]))
    assert_close(load(tmp_path, kernels).encode(texts), expected)


def test_bfloat16_weights_compute_in_float32(tmp_path: Path) -> None:
    model: Any = checkpoints.MODELS["bert"]()
    model = checkpoints.save(model.to(torch.bfloat16), tmp_path)
    model.float()
    texts = random_texts(LENGTHS)
    assert_close(load(tmp_path).encode(texts), _vectors(model, texts, "mean"))


def test_processes_share_packed_weights(tmp_path: Path) -> None:
    folder, state = tmp_path / "model", tmp_path / "state"
    checkpoints.make("bert", folder)
    first, again = (loaded(folder, state_dir=str(state)) for _ in range(2))
    assert len(list(state.rglob("*.safetensors"))) == 1
    texts = random_texts(LENGTHS)
    assert (first.encoder.encode(texts) == again.encoder.encode(texts)).all()
    assert (first.encoder.encode(texts) == load(folder).encode(texts)).all()
    assert first.info == again.info
