"""Tests that a draft model changes only the number of steps, wherever its target's blocks come from."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem_engine.assembly import AssembledEngine
from tandem_engine.core import EngineCore
from tandem_engine.errors import ModelUnusable
from tandem_engine.execution.draft_runner import DraftRunner
from tandem_engine.messages import AddRequest, ExtentRef, ImportSlab, MapRegion, ReleaseHeld, RequestOutput, StartDecode
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.draft_model import MAX_CATCH_UP_TOKENS, NUM_DRAFT_TOKENS
from tests import checkpoints
from tests.tandem_engine.execution.test_speculation import answers_of, outputs_of, random_prompts

MakeEngine = Callable[..., AssembledEngine]
ROOT = "ab" * 16


class Recorder:
    """Delegates to the draft runner of an engine, in every step; records how many tokens it lacked."""

    def __init__(self, core: EngineCore) -> None:
        speculator = core.scheduler.speculator
        speculator.use([])
        speculator.model_cutoff = 0.0
        assert isinstance(speculator._model, DraftRunner)
        self.runner = speculator._model
        self.missing: dict[str, list[int]] = {}
        speculator._model = self

    def num_missing(self, request: Request) -> int | None:
        return self.runner.num_missing(request)

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        for request in wanted:
            num_missing = self.runner.num_missing(request)
            assert num_missing is not None
            self.missing.setdefault(request.request_id, []).append(num_missing)
        return self.runner.propose(wanted)

    def forget(self, request: Request) -> None:
        self.runner.forget(request)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(num_tokens, temperature=0.0)


def drained(core: EngineCore) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    while core.has_work():
        outputs += core.step().outputs
    return outputs


@pytest.fixture
def other_weights(make_checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """A smaller model of the same tokenizer and other random weights."""
    folder = tmp_path / "small"
    config = checkpoints.CONFIGS["llama"]()
    config.num_hidden_layers = 1
    torch.manual_seed(10)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_checkpoint("llama") / name, folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {"block_size": 4}),
        ("llama", {"kernels": "torch"}),
        ("gemma2", {"block_size": 4}),
        ("qwen2", {"block_size": 4}),  # of several groups; as a draft model it has one
        ("mistral", {"block_size": 4}),  # which gives back blocks that the draft model needs
    ],
)
def test_a_model_that_guesses_for_itself_changes_nothing(
    kind: str, settings: dict[str, Any], make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    prompts = random_prompts([1, 15, 40])
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64} | settings
    plain = outputs_of(make_engine(kind, speculation="off", **settings).core, prompts)
    core = make_engine(kind, draft_model=str(make_checkpoint(kind)), **settings).core
    Recorder(core)
    guessed = outputs_of(core, prompts)
    assert answers_of(guessed) == answers_of(plain)
    for name, of_one in plain.items():
        assert [each for output in guessed[name] for each in output.logprobs] == [
            each for output in of_one for each in output.logprobs
        ]
        assert guessed[name][-1].finish_reason == of_one[-1].finish_reason
        if name.startswith("greedy ") and "penalties" not in name:
            drafted = guessed[name][-1]
            assert drafted.num_accepted_tokens == drafted.num_draft_tokens, "it is the same model"
            assert drafted.num_draft_tokens > 0 or (kind == "mistral" and name == "greedy 2")
    stats = core.scheduler.stats()
    assert stats.counters["draft_tokens"] > stats.counters["draft_tokens_accepted"] > 50
    assert stats.num_free_blocks == stats.num_total_blocks


def test_a_model_of_other_weights_is_hardly_ever_right_and_changes_nothing(
    make_engine: MakeEngine, other_weights: Path
) -> None:
    prompts = random_prompts([1, 15, 40])
    plain = outputs_of(make_engine("llama", speculation="off").core, prompts)
    core = make_engine("llama", draft_model=str(other_weights)).core
    Recorder(core)
    guessed = outputs_of(core, prompts)
    assert answers_of(guessed) == answers_of(plain)
    counters = core.scheduler.stats().counters
    assert counters["draft_tokens_accepted"] < 0.05 * counters["draft_tokens"]


def test_after_a_preemption_its_keys_and_values_are_computed_again(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    settings: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 20}
    prompts = random_prompts([11, 14, 13])
    answers = []
    for extra in ({"speculation": "off"}, {"draft_model": str(make_checkpoint("llama"))}):
        core = make_engine("llama", **settings, **extra).core
        recorder = Recorder(core) if "draft_model" in extra else None
        for number, prompt in enumerate(prompts):
            core.handle(AddRequest(f"r{number}", prompt, len(prompt), greedy(30), hash_root=ROOT))
        outputs = drained(core)
        answers.append(
            {f"r{n}": [t for o in outputs if o.request_id == f"r{n}" for t in o.token_ids] for n in range(3)}
        )
        assert core.scheduler.stats().counters["preemptions"] > 0
    assert answers[0] == answers[1]
    assert recorder is not None
    counters = core.scheduler.stats().counters
    assert counters["draft_tokens_accepted"] == counters["draft_tokens"] > 20
    preempted = max(recorder.missing.values(), key=lambda of_one: sum(each > 4 for each in of_one))
    assert sum(each > 4 for each in preempted) == 2, "once at first, and once after it lost its blocks"


def test_blocks_found_in_the_prefix_cache_are_of_use_if_the_draft_model_filled_them(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    core = make_engine("llama", block_size=4, draft_model=str(make_checkpoint("llama"))).core
    speculator = core.scheduler.speculator
    model, speculator._model = speculator._model, None
    (prompt,) = random_prompts([30])

    def answer(name: str, token_ids: list[int]) -> RequestOutput:
        core.handle(AddRequest(name, token_ids, len(token_ids), greedy(8), hash_root=ROOT))
        return drained(core)[-1]

    answer("unseen", prompt)  # the draft model was not there
    speculator._model = model
    recorder = Recorder(core)
    for name in ("first", "second"):
        output = answer(name, prompt)
        assert output.num_cached_tokens == 28
        assert output.num_accepted_tokens == output.num_draft_tokens > 0
    assert recorder.missing["first"][0] == 31
    assert recorder.missing["second"][0] == 31 - 28, "all full blocks of the prompt"
    longer = [*prompt[:13], *random_prompts([9])[0]]
    output = answer("third", longer)
    assert output.num_accepted_tokens == output.num_draft_tokens > 0
    assert recorder.missing["third"][0] == 23 - 12


def test_blocks_handed_out_again_count_as_empty(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    core = make_engine("llama", block_size=4, num_kv_blocks=12, draft_model=str(make_checkpoint("llama"))).core
    recorder = Recorder(core)
    for number, prompt in enumerate(random_prompts([30, 30, 30])):
        core.handle(AddRequest(f"r{number}", prompt, len(prompt), greedy(10), hash_root=ROOT))
        output = drained(core)[-1]
        assert recorder.missing[f"r{number}"][0] == 31
        assert output.num_accepted_tokens == output.num_draft_tokens > 0


def test_handed_over_blocks_hold_nothing_of_the_draft_models(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    prefill = make_engine("llama", region_id="prefill")
    decode = make_engine("llama", draft_model=str(make_checkpoint("llama")))
    recorder = Recorder(decode.core)
    (prompt,) = random_prompts([41])
    plain = make_engine("llama", speculation="off").core
    plain.handle(AddRequest("a", prompt, len(prompt), greedy(20)))
    expected = [token for output in drained(plain) for token in output.token_ids]
    ready = prefill.ready
    decode.core.handle(
        MapRegion("prefill", ready.region_bytes, ready.num_blocks, ready.generations_offset), prefill.region_fds[0]
    )
    decode.core.handle(AddRequest("a", prompt, len(prompt), greedy(20), mode="decode"))
    prefill.core.handle(AddRequest("a", prompt, len(prompt), greedy(20), mode="prefill"))
    size = ready.layout.bytes_per_block
    first: list[int] = []
    while prefill.core.has_work():
        done = prefill.core.step()
        for number, sealed in enumerate(done.sealed):
            extents = [
                ExtentRef("prefill", slot * size, size, slot, generation)
                for slot, generation in zip(sealed.slots, sealed.generations, strict=True)
            ]
            decode.core.handle(ImportSlab("a", number, sealed.first_block, extents))
        first += [token for output in done.outputs for token in output.token_ids]
    prefill.core.handle(ReleaseHeld("a"))
    decode.core.handle(StartDecode("a", first))
    outputs = drained(decode.core)
    assert first + [token for output in outputs for token in output.token_ids] == expected
    assert decode.core.scheduler.stats().counters["reprefill_tokens"] == 0
    assert recorder.missing["a"][0] == 42, "the prompt and its first token"
    assert outputs[-1].num_accepted_tokens == outputs[-1].num_draft_tokens > 10


def test_a_long_prompt_is_caught_up_with_in_several_steps_and_nothing_is_proposed_before(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    (prompt,) = random_prompts([400])
    core = make_engine("llama", draft_model=str(make_checkpoint("llama")), max_num_batched_tokens=512).core
    recorder = Recorder(core)
    core.handle(AddRequest("a", prompt, len(prompt), greedy(30)))
    outputs = drained(core)
    assert recorder.missing["a"][:2] == [401, 401 + 1 - MAX_CATCH_UP_TOKENS]
    assert [len(output.token_ids) for output in outputs[:3]] == [1, 1, 1 + NUM_DRAFT_TOKENS]
    assert outputs[-1].num_accepted_tokens == outputs[-1].num_draft_tokens > 0


def test_no_proposal_lies_beyond_the_draft_models_context(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    short = tmp_path / "short"
    shutil.copytree(make_checkpoint("llama"), short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    (prompt,) = random_prompts([20])
    core = make_engine("llama", draft_model=str(short)).core
    recorder = Recorder(core)
    core.handle(AddRequest("a", prompt, len(prompt), greedy(50)))
    outputs = drained(core)
    last = next(index for index, output in enumerate(outputs) if output.position > 40)
    assert {len(output.token_ids) for output in outputs[last:]} == {1}
    assert outputs[-1].num_accepted_tokens == outputs[-1].num_draft_tokens > 10
    assert recorder.runner._context_length == 40


def test_a_draft_model_that_breaks_is_switched_off_and_ends_no_request(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    prompts = random_prompts([5, 9])
    plain = outputs_of(make_engine("llama", speculation="off").core, prompts)
    core = make_engine("llama", draft_model=str(make_checkpoint("llama"))).core
    runner: Any = core.scheduler.speculator._model
    calls = []

    def breaking(*arguments: Any) -> Any:
        calls.append(arguments)
        raise RuntimeError("no memory")

    vars(runner._model)["forward"] = breaking
    with caplog.at_level(logging.ERROR):
        assert answers_of(outputs_of(core, prompts)) == answers_of(plain)
    assert len(calls) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the draft model is switched off: RuntimeError: no memory"
    ]
    assert core.scheduler.speculator._model is None


def test_the_speculator_calls_a_draft_model_by_itself(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    prompts = random_prompts([5, 9, 30])
    plain = outputs_of(make_engine("llama", speculation="off").core, prompts)
    core = make_engine("llama", draft_model=str(make_checkpoint("llama"))).core
    core.scheduler.speculator.use([])
    assert answers_of(outputs_of(core, prompts)) == answers_of(plain)
    assert core.scheduler.stats().counters["draft_tokens_accepted"] > 0
    assert not core.scheduler.speculator._of_model
    runner: Any = core.scheduler.speculator._model
    assert not runner._held, "nothing is kept of requests that are over"


def test_a_draft_model_of_another_vocabulary_is_refused(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelUnusable, match=r"@tandem/demo cannot draft for tiny-llama: its vocabulary has .* 320"):
        make_engine("llama", draft_model="@tandem/demo")
    other = tmp_path / "renamed"
    shutil.copytree(make_checkpoint("llama"), other)
    tokenizer = other / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"model_max_length": 7}))
    with pytest.raises(ModelUnusable, match=r"renamed cannot draft for tiny-llama: their tokenizer"):
        make_engine("llama", draft_model=str(other))
    with pytest.raises(ModelUnusable, match=r"--draft-model ./nowhere: ./nowhere is not a folder"):
        make_engine("llama", draft_model="./nowhere")


def test_the_pool_leaves_room_for_the_draft_models_keys_and_values(
    make_engine: MakeEngine, make_checkpoint: Callable[[str], Path]
) -> None:
    settings: dict[str, Any] = {"num_kv_blocks": None, "kv_memory_bytes": 2_000_000}
    alone = make_engine("llama", **settings).ready
    with_draft = make_engine("llama", draft_model=str(make_checkpoint("llama")), **settings)
    size = alone.layout.bytes_per_block
    assert alone.num_blocks == 2_000_000 // size
    assert with_draft.ready.num_blocks == 2_000_000 // (2 * size)
    runner: Any = with_draft.core.scheduler.speculator._model
    assert runner._cache.num_blocks == with_draft.ready.num_blocks


def test_it_is_not_loaded_where_nothing_is_guessed(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = make_engine("llama", speculation="off", draft_model="./nowhere")
    assert engine.core.scheduler.speculator._model is None
    assert "the draft model ./nowhere is not loaded: this engine uses no drafts" in caplog.messages
