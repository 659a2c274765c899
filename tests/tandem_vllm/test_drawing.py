"""Tests that the draw in vLLM's batch is our own engine's, whatever vLLM does with its rows and its prompts."""

from __future__ import annotations

import pytest
import torch

from tandem_engine.demo import checkpoint_path
from tandem_engine.execution.grammar.compiled import no_guide
from tandem_engine.execution.grammar.guided import Guide
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.sampler import Draw, sample
from tandem_engine.grammar import Grammar
from tandem_engine.ops.cpu import KernelsUnavailable
from tandem_engine.ops.cpu.library import load_kernels
from tandem_engine.ops.cpu.sampling import Sampler
from tandem_engine.sampling_params import SamplingParams
from tandem_vllm.drawing import Drawer, RowRequest, RowUpdate, decode_row_request, encode_row_request

VOCAB = 320
PROMPT = [7, 3, 3, 250]
KINDS = {
    "greedy": SamplingParams(max_tokens=9, temperature=0.0),
    "sampled": SamplingParams(max_tokens=9, seed=2**63, temperature=1.3, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(
        max_tokens=9, seed=4, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.4, logit_bias={9: 4.0}
    ),
    "min_tokens": SamplingParams(
        max_tokens=9, seed=5, temperature=0.7, min_tokens=6, stop_token_ids=tuple(range(0, VOCAB, 2))
    ),
    "logprobs": SamplingParams(max_tokens=9, seed=6, num_logprobs=3),
}


def logits_of(position: int) -> torch.Tensor:
    """A model: the logits of a row depend on the number of its tokens."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(position)) * 3


def drawer() -> Drawer:
    return Drawer(GrammarMasks(no_guide))


def row(name: str, num_prompt_tokens: int = len(PROMPT)) -> RowRequest:
    return RowRequest(name, num_prompt_tokens, KINDS[name])


def expected(name: str, tokens: list[int]) -> int:
    (sampled,) = sample(
        logits_of(len(tokens)).unsqueeze(0), [Draw("r", KINDS[name], (KINDS[name].seed,), tokens, len(PROMPT))]
    )["r"]
    return sampled.token_id


def answer(name: str, num_tokens: int) -> list[int]:
    """Return the answer that our own engine gives."""
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(expected(name, tokens))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("split", [0, 1, 5])
def test_every_row_draws_what_our_engine_draws_also_behind_a_migration(split: int) -> None:
    """vLLM's prompt has the first `split` tokens of each answer; its output list grows behind our back."""
    ours, outputs = drawer(), {name: list[int]() for name in KINDS}
    begun = {name: [*PROMPT, *answer(name, split)] for name in KINDS}
    ours.update(RowUpdate([(i, row(name), begun[name], outputs[name]) for i, name in enumerate(KINDS)]))
    for _ in range(8 - split):
        logits = torch.stack([logits_of(len(begun[name]) + len(outputs[name])) for name in KINDS])
        drawn = ours.draw(logits, set(KINDS))
        assert not drawn.failures
        for name, largest in zip(KINDS, logits.argmax(-1).tolist(), strict=True):
            assert largest == drawn.sampled[name].token_id
            outputs[name].append(largest)
    assert {name: begun[name][len(PROMPT) :] + outputs[name] for name in KINDS} == {n: answer(n, 8) for n in KINDS}


def test_rows_follow_the_batch_as_it_shrinks_swaps_and_reuses_places() -> None:
    ours = drawer()
    names = list(KINDS)
    ours.update(RowUpdate([(i, row(name), PROMPT, []) for i, name in enumerate(names[:3])]))
    ours.update(RowUpdate(moved=[(0, 2, True)]))  # penalties, sampled, greedy
    ours.update(RowUpdate(added=[(1, row("logprobs"), PROMPT, [])], removed=[0], moved=[(2, 0, False)]))
    logits = torch.stack([logits_of(len(PROMPT))] * 2)
    drawn = ours.draw(logits, {"greedy", "logprobs"})  # greedy at 0, logprobs at 1
    assert logits.isinf().nonzero().tolist() == [
        [0, expected("greedy", PROMPT)],
        [1, expected("logprobs", PROMPT)],
    ]
    assert drawn.sampled["greedy"].logprobs is None
    assert drawn.sampled["logprobs"].logprobs is not None and len(drawn.sampled["logprobs"].logprobs.top) == 3


@pytest.mark.parametrize("samples", [("greedy", "min_tokens"), ("sampled", "penalties"), ("penalties",)])
def test_the_cpp_sampler_draws_the_same_from_rows_in_any_place(samples: tuple[str, ...]) -> None:
    """Rows that follow one another are not copied; others, between prompts that are not complete, are."""
    try:
        op = Sampler(load_kernels().library).sample
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    names = list(KINDS)
    found = []
    for ours in (drawer(), Drawer(GrammarMasks(no_guide), op)):
        ours.update(RowUpdate([(index, row(name), PROMPT, []) for index, name in enumerate(names)]))
        logits = torch.stack([logits_of(len(PROMPT))] * len(names))
        drawn = ours.draw(logits, set(samples))
        found.append({name: token.token_id for name, token in drawn.sampled.items()})
        assert sorted(logits.isinf().nonzero().tolist()) == sorted(
            [names.index(name), token_id] for name, token_id in found[-1].items()
        )
    assert found[0] == found[1] == {name: expected(name, PROMPT) for name in samples}


def test_a_prompt_that_is_not_complete_draws_nothing() -> None:
    ours = drawer()
    ours.update(RowUpdate([(0, row("greedy"), PROMPT, []), (1, row("sampled"), PROMPT, [])]))
    logits = torch.stack([torch.full((VOCAB,), torch.nan), logits_of(len(PROMPT))])
    drawn = ours.draw(logits, {"sampled"})
    assert list(drawn.sampled) == ["sampled"] and not drawn.failures
    assert not logits[0].isinf().any()


def test_a_request_whose_logits_are_not_numbers_fails_alone() -> None:
    ours = drawer()
    ours.update(RowUpdate([(0, row("sampled"), PROMPT, []), (1, row("penalties"), PROMPT, [])]))
    logits = torch.stack([torch.full((VOCAB,), torch.nan), logits_of(len(PROMPT))])
    drawn = ours.draw(logits, {"sampled", "penalties"})
    assert [(each.request_id, each.is_callers_fault) for each in drawn.failures] == [("sampled", False)]
    assert drawn.sampled["penalties"].token_id == expected("penalties", PROMPT)


def test_a_grammar_goes_on_where_the_answer_was_when_it_moved() -> None:
    """The grammar sees the answer's tokens in vLLM's prompt; one that cannot be compiled fails alone."""
    from pathlib import Path

    from tokenizers import Tokenizer

    path = Path(checkpoint_path()) / "tokenizer.json"
    words = Tokenizer.from_file(str(path))
    vocab_size, eos = 3072, 2

    def run(text: str, prompt: list[int], num_prompt_tokens: int) -> tuple[list[int], list[str]]:
        masks = GrammarMasks(lambda: Guide(path, vocab_size, [eos]))
        sampling = SamplingParams(max_tokens=40, seed=8, grammar=Grammar("regex", text), stop_token_ids=(eos,))
        ours, output = Drawer(masks), list[int]()
        ours.update(RowUpdate([(0, RowRequest("r", num_prompt_tokens, sampling), prompt, output)]))
        while eos not in output:
            position = len(prompt) + len(output)
            drawn = ours.draw(torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(position)), {"r"})
            if drawn.failures:
                return output, [each.message for each in drawn.failures]
            output.append(drawn.sampled["r"].token_id)
        return output, []

    whole, _ = run("a{3}[xyz]{4}b", PROMPT, len(PROMPT))
    assert len(whole) > 3 and words.decode(whole).startswith("aaa")
    rest, _ = run("a{3}[xyz]{4}b", [*PROMPT, *whole[:3]], len(PROMPT))
    assert rest == whole[3:]
    tokens, messages = run("(", PROMPT, len(PROMPT))
    assert tokens == [] and "grammar" in messages[0]


def test_sampling_parameters_survive_the_way_through_vllm() -> None:
    """vLLM may send its parameters to other processes, as MessagePack."""
    for name in KINDS:
        assert decode_row_request(encode_row_request(row(name))) == row(name)
