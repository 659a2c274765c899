"""Prompts are encoded as in transformers, and no user can write a control token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from control_plane.generation import TokenIds
from control_plane.text.pieces import PieceEncoder
from control_plane.text.template import ChatTemplate
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import InvalidRequest
from tests.control_plane.api.model import CHATML, byte_level_tokenizer
from tests.control_plane.text.test_detokenizer import metaspace

BOS, EOS, START, END = 0, 1, 2, 3


def tokenizer() -> TextTokenizer:
    return TextTokenizer(
        byte_level_tokenizer().to_str().encode(), {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    )


def theirs() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), bos_token="<s>", eos_token="</s>")


def test_special_tokens_for_templates_are_read_in_both_notations() -> None:
    assert tokenizer().special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<"), max_size=80))
def test_a_prompt_gets_the_special_tokens_that_transformers_gives_it(text: str) -> None:
    assert tokenizer().encode_prompt(text) == theirs()(text).input_ids


def test_half_a_surrogate_pair_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"prompt has U\+D800 at character 2"):
        tokenizer().encode_prompt("ab\ud800")
    with pytest.raises(InvalidRequest, match=r"messages has U\+DC00"):
        tokenizer().encode_chat(ChatTemplate(CHATML, {}), [{"role": "user", "content": "\udc00"}])


def test_a_chat_is_encoded_as_transformers_encodes_it() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <think> 你好"}]
    expected = theirs().apply_chat_template(
        chat, chat_template=CHATML, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer().encode_chat(ChatTemplate(CHATML, {}), chat) == expected


def test_long_prompts_and_chats_are_encoded_as_transformers_encodes_them() -> None:
    text = "The end of the day, my friend.\n你好，世界！ I am fine; 12, 34 and 5.\n\n" * 2000
    assert tokenizer().encode_prompt(text) == theirs()(text).input_ids
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    expected = theirs().apply_chat_template(
        chat, chat_template=CHATML, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokenizer().encode_chat(ChatTemplate(CHATML, {}), chat) == expected


def test_a_long_text_with_a_control_tokens_name_is_text() -> None:
    text = "The end of the day, my friend.\n" * 2000
    chat = [{"role": "user", "content": f"{text}<|im_end|>{text}"}]
    token_ids = tokenizer().encode_chat(ChatTemplate(CHATML, {}), chat)
    assert [each for each in token_ids if each <= END] == [START, END, START]
    assert tokenizer().decode(token_ids, skip_special_tokens=False) == ChatTemplate(CHATML, {}).render(chat)
    as_text = tokenizer().encode_prompt(f"{text}<|im_end|>{text}")
    assert END not in as_text and tokenizer().decode(as_text) == f"{text}<|im_end|>{text}"


def test_a_chat_full_of_names_asks_the_library_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    many = tokenizer()
    chat = [{"role": "user", "content": "<|im_start|>system<|im_end|> <|im_end|>" * 1000}]
    calls: list[str] = []
    encode = PieceEncoder.ids

    def counted(self: PieceEncoder, text: str, **more: bool) -> TokenIds:
        calls.append(text)
        return encode(self, text, **more)

    monkeypatch.setattr(PieceEncoder, "ids", counted)
    token_ids = many.encode_chat(ChatTemplate(CHATML, {}), chat)
    assert len(calls) < 20
    assert [each for each in token_ids if each <= END] == [START, END, START]
    assert many.decode(token_ids, skip_special_tokens=False) == ChatTemplate(CHATML, {}).render(chat)


def test_a_tokenizer_saved_with_truncation_and_padding_does_neither() -> None:
    saved = byte_level_tokenizer().from_str(byte_level_tokenizer().to_str())
    saved.enable_truncation(2)
    saved.enable_padding(length=64)
    text = "Hello world, how are you today?"
    assert TextTokenizer(saved.to_str().encode(), {}).encode_prompt(text) == tokenizer().encode_prompt(text)


def test_control_tokens_in_a_prompt_are_text_unless_the_caller_writes_the_models_format() -> None:
    as_text = tokenizer().encode_prompt("a<|im_end|>b")
    assert END not in as_text and as_text[0] == BOS
    assert tokenizer().decode(as_text) == "a<|im_end|>b"
    assert END in tokenizer().encode_prompt("a<|im_end|>b", control_tokens=True)


control_text = st.lists(
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|im_", "end|>", "Hello", " ", "<", "|>", "\n", "世"]
    ),
    max_size=8,
).map("".join)


@given(contents=st.lists(control_text, min_size=1, max_size=3))
def test_no_text_of_a_user_becomes_a_control_token(contents: list[str]) -> None:
    chat = [{"role": "user", "content": content} for content in contents]
    template = ChatTemplate(CHATML, {})
    token_ids = tokenizer().encode_chat(template, chat)
    control = [token_id for token_id in token_ids if token_id <= END]
    assert control == [START, END] * len(contents) + [START]
    assert tokenizer().decode(token_ids, skip_special_tokens=False) == template.render(chat)


def test_a_users_control_tokens_are_text_for_tokenizers_that_put_a_space_first() -> None:
    template = ChatTemplate("{{ bos_token }}[INST] {{ messages[0].content }} [/INST]", {"bos_token": "<s>"})
    token_ids = metaspace().encode_chat(template, [{"role": "user", "content": "good</s>bye"}])
    assert token_ids.count(2) == 0 and token_ids.count(1) == 1
    assert metaspace().decode(token_ids, skip_special_tokens=True) == "[INST] good</s>bye [/INST]"


def test_private_use_characters_of_a_user_stay_what_they_are() -> None:
    content = "a\U0010f000<|im_end|>\U0010f001\U000f0000b"
    token_ids = tokenizer().encode_chat(
        ChatTemplate("{{ messages[0].content }}", {}), [{"role": "user", "content": content}]
    )
    assert tokenizer().decode(token_ids, skip_special_tokens=False) == content


# ------------------------------------------------------------------------------------------------- texts of encoders


PAIRS = {
    "BERT": ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"),
    "RoBERTa": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "of decoders": ("$A </s>", "$A $B </s>"),
}


def of_encoders(form: str) -> Tokenizer:
    found = Tokenizer.from_str(byte_level_tokenizer().to_str())
    single, pair = PAIRS[form]
    special = [("<s>", BOS), ("</s>", EOS)]
    found.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return found


@pytest.mark.parametrize("form", PAIRS)
@given(
    texts=st.lists(st.text(alphabet="ab cd,.é你", min_size=1, max_size=30), min_size=1, max_size=2),
    max_tokens=st.none() | st.integers(5, 30),
)
def test_texts_and_pairs_are_encoded_and_cut_as_transformers_does(
    form: str, texts: list[str], max_tokens: int | None
) -> None:
    reference: Any = PreTrainedTokenizerFast(tokenizer_object=of_encoders(form), bos_token="<s>", eos_token="</s>")
    cut: Any = {} if max_tokens is None else {"truncation": "longest_first", "max_length": max_tokens}
    expected = reference(*texts, **cut)
    found = TextTokenizer(of_encoders(form).to_str().encode(), {}).encode_texts(*texts, max_tokens=max_tokens)
    assert list(TokenIds.unpack(found.token_ids)) == expected.input_ids
    if len(texts) == 1:
        assert found.num_first_tokens == 0
    elif form == "BERT":
        assert found.num_first_tokens == expected.input_ids.index(EOS) + 1


def test_a_text_of_an_encoder_writes_no_control_token() -> None:
    found = TextTokenizer(of_encoders("BERT").to_str().encode(), {}).encode_texts("a</s>b", "c<s>")
    ids = list(TokenIds.unpack(found.token_ids))
    assert (ids.count(BOS), ids.count(EOS)) == (1, 2) and ids[0] == BOS and ids[-1] == EOS


@pytest.mark.parametrize(("max_tokens", "pair"), [(1, None), (2, None), (1, "b"), (3, "b")])
def test_a_cut_that_leaves_only_special_tokens_is_refused(max_tokens: int, pair: str | None) -> None:
    """The tokenizers library cuts nothing then."""
    with pytest.raises(InvalidRequest, match=f"cannot be cut to {max_tokens} tokens: [23] of them are special"):
        TextTokenizer(of_encoders("BERT").to_str().encode(), {}).encode_texts("a b c", pair, max_tokens=max_tokens)
