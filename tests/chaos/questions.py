"""The requests of a run, with the answers of an undisturbed model.

The reference is transformers' forward pass, token by token, with the engine's pure sampler (law 3).
Questions whose answers have a close choice are left out: each token must also win with its logit lower by MARGIN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from tandem_engine.execution.sampler import Draw, sample
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.request import Sampled
from tests.checkpoints import CONFIGS, byte_level_tokenizer

MARGIN = 1e-3
MODEL_ID = "chaos-llama"
CONTEXT = 1024
_TOKEN_IDS = range(3, 300)
_LONGEST_PROMPT = 600


@dataclass(frozen=True)
class Answer:
    """One choice, its stop token included."""

    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...]
    """Log probabilities of the tokens; empty if not requested."""


@dataclass(frozen=True)
class Question:
    """A prompt with its sampling parameters and the answer to each of its seeds."""

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    answers: tuple[Answer, ...]

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


def make_checkpoint(folder: Path) -> Path:
    """Return the folder of the run's model: tiny, with random weights and a long context."""
    target = folder / MODEL_ID
    torch.manual_seed(9)
    config = CONFIGS["llama"]()
    config.max_position_embeddings = CONTEXT
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)
    byte_level_tokenizer().save_pretrained(target)
    return target


def make_questions(checkpoint: Path, seed: int, number: int) -> list[Question]:
    """Return `number` questions, the same for each seed."""
    reference, rng = _Reference(checkpoint), random.Random(f"{seed} questions")
    questions: list[Question] = []
    while len(questions) < number:
        prompt = _prompt(rng, questions)
        sampling, num_choices = _sampling(rng)
        seeds = tuple(rng.getrandbits(60) for _ in range(num_choices))
        answers = [reference.answer(prompt, msgspec.structs.replace(sampling, seed=seed)) for seed in seeds]
        if all(answers):
            name = f"question {len(questions)}"
            clear = tuple(answer for answer in answers if answer is not None)
            questions.append(_with_a_stop_token(rng, Question(name, prompt, sampling, seeds, clear)))
    return questions


def _prompt(rng: random.Random, before: Sequence[Question]) -> tuple[int, ...]:
    """Return a prompt; some prompts are the next turn of an earlier one."""
    num_new = rng.randint(*rng.choice([(20, 60), (60, 200), (200, _LONGEST_PROMPT)]))
    if before and rng.random() < 0.3:
        earlier = rng.choice(before)
        record = earlier.prompt + earlier.answers[0].tokens
        if len(record) + 20 < _LONGEST_PROMPT:
            return (*record, *rng.choices(_TOKEN_IDS, k=min(num_new, _LONGEST_PROMPT - len(record))))
    return tuple(rng.choices(_TOKEN_IDS, k=num_new))


def _sampling(rng: random.Random) -> tuple[SamplingParams, int]:
    """Return sampling parameters and seeds."""
    length = rng.randint(*rng.choice([(1, 8), (20, 80), (100, 250), (100, 250)]))
    is_seeded = rng.random() < 0.5
    sampling = SamplingParams(
        max_tokens=length,
        temperature=rng.choice([0.5, 1.0, 1.5]) if is_seeded else 0.0,
        top_k=rng.choice([0, 0, 40]) if is_seeded else 0,
        num_logprobs=rng.choice([None, None, 0, 3]),
    )
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.5, "presence_penalty": 0.4},
        {"logit_bias": {7: 2.0, 11: -100.0}},
    ]
    if rng.random() < 0.3:
        sampling = msgspec.structs.replace(sampling, **rng.choice(penalties))
    return sampling, 2 if is_seeded and rng.random() < 0.25 else 1


def _with_a_stop_token(rng: random.Random, question: Question) -> Question:
    """Give a fifth of the questions a stop token that occurs in the answer."""
    if rng.random() > 0.2:
        return question
    stop = rng.choice(question.answers[0].tokens)
    answers = tuple(_stopped(answer, stop) for answer in question.answers)
    return replace(
        question, sampling=msgspec.structs.replace(question.sampling, stop_token_ids=(stop,)), answers=answers
    )


def _stopped(answer: Answer, stop: int) -> Answer:
    if stop not in answer.tokens:
        return answer
    end = answer.tokens.index(stop) + 1
    return Answer(answer.tokens[:end], "stop", answer.logprobs[:end])


class _Reference:
    """The model, run by transformers."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def answer(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Answer | None:
        """Return the answer; None if the choice of one of its tokens was too close."""
        tokens, logprobs = list(prompt), list[float]()
        cache, fresh = None, tokens
        with torch.inference_mode():
            while len(tokens) < len(prompt) + sampling.max_tokens:
                output = self._model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                draw = Draw("", sampling, (sampling.seed,), tuple(tokens), len(prompt))
                sampled = _clear_choice(output.logits[:, -1], draw)
                if sampled is None:
                    return None
                fresh = [sampled.token_id]
                tokens.append(sampled.token_id)
                if sampled.logprobs is not None:
                    logprobs.append(sampled.logprobs.chosen.logprob)
        return Answer(tuple(tokens[len(prompt) :]), "length", tuple(logprobs))


def _clear_choice(logits: torch.Tensor, draw: Draw) -> Sampled | None:
    """Return the next token, if it would also win with a slightly lower logit."""
    [chosen] = sample(logits, [draw])[""]
    lowered = logits.clone()
    lowered[0, chosen.token_id] -= MARGIN
    [again] = sample(lowered, [draw])[""]
    return chosen if again.token_id == chosen.token_id else None
