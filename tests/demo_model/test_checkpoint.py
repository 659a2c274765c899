"""The packaged checkpoint loads like any other, is small, and its template renders the training format."""

import json
from itertools import islice
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from demo_model.chat_format import CHAT_TEMPLATE_PATH, ChatEncoder
from demo_model.corpus import Document, documents
from demo_model.tokenizer import load_tokenizer
from tandem_engine.demo import MODEL_ID, checkpoint_path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(checkpoint_path())


def rendered(tokenizer: Any, document: Document) -> str:
    messages = [message.as_dict() for message in document.messages]
    text: str = tokenizer.apply_chat_template(messages, tools=list(document.tools) or None, tokenize=False)
    return text


def test_the_package_is_named_and_whole() -> None:
    assert MODEL_ID == "@tandem/demo"
    expected = {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja",
    }  # fmt: skip
    assert expected == {path.name for path in checkpoint_path().iterdir()}


def test_the_model_loads_without_remote_code_and_is_small() -> None:
    assert (checkpoint_path() / "model.safetensors").stat().st_size <= 25_000_000
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert 5_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 15_000_000


def test_loading_leaves_no_weight_missing_or_unexpected() -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(checkpoint_path(), output_loading_info=True)
    report = loaded[1]
    assert not set(report["missing_keys"]) - {"lm_head.weight"}
    assert not report["unexpected_keys"] and not report["mismatched_keys"]


def test_generation_ends_at_either_end_token(tokenizer: Any) -> None:
    ends = GenerationConfig.from_pretrained(checkpoint_path()).eos_token_id
    assert ends == [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    assert tokenizer.eos_token == "<|im_end|>"
    assert AutoConfig.from_pretrained(checkpoint_path()).max_position_embeddings == 2048


def test_the_template_renders_all_roles(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What time is it in Oslo?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}]},
        {"role": "tool", "content": '{"hour": 9}'},
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat time is it in Oslo?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>tool\n{"hour": 9}<|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_arguments_given_as_a_string_render_like_an_object(tokenizer: Any) -> None:
    def text(arguments: object) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        rendered_text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        return rendered_text

    assert text({"a": 1}) == text('{"a": 1}')


def test_training_sees_exactly_what_the_template_renders(tokenizer: Any) -> None:
    encoder = ChatEncoder(load_tokenizer(checkpoint_path() / "tokenizer.json"))
    chats = [document for document in islice(documents(2), 600) if not document.text]
    assert any(document.tools for document in chats) and any(document.system for document in chats)
    for document in chats:
        text = rendered(tokenizer, document) + "<|endoftext|>"
        assert encoder.encode(document).token_ids == tokenizer(text, add_special_tokens=False)["input_ids"], text


def test_the_packaged_template_is_the_source_one() -> None:
    assert (checkpoint_path() / "chat_template.jinja").read_text() == CHAT_TEMPLATE_PATH.read_text()


def test_digits_and_spaces_are_tokens_of_their_own_and_any_text_comes_back(tokenizer: Any) -> None:
    assert tokenizer.tokenize("17 + 25") == ["1", "7", "Ġ", "+", "Ġ", "2", "5"]
    assert tokenizer.tokenize('the hare "hare" open_hare') == [
        "the", "Ġ", "hare", "Ġ", '"', "hare", '"', "Ġ", "open", "_", "hare",
    ]  # fmt: skip
    for text in ("  two  spaces\n\n\ttab", "naïve café 日本 🚀", "x" * 50, '{"a": [1, 2]}', ""):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_the_tokenizer_adds_nothing_to_a_raw_prompt(tokenizer: Any) -> None:
    assert (
        tokenizer("Once upon a time")["input_ids"]
        == tokenizer("Once upon a time", add_special_tokens=False)["input_ids"]
    )


def test_special_tokens_have_the_first_ids_and_are_special(tokenizer: Any) -> None:
    added = json.loads((checkpoint_path() / "tokenizer.json").read_text())["added_tokens"]
    assert [(token["id"], token["content"], token["special"]) for token in added] == [
        (0, "<|endoftext|>", True), (1, "<|im_start|>", True), (2, "<|im_end|>", True),
    ]  # fmt: skip
