"""Training: batches are filled right, a run resumes bit for bit, and its export computes the same."""

import json
from pathlib import Path

import pytest
import torch

from demo_model.batches import IGNORED_TARGET, BatchStream
from demo_model.chat_format import ChatEncoder
from demo_model.export import export
from demo_model.model import DemoModel, ModelShape
from demo_model.run_folder import RunFolder
from demo_model.schedule import Schedule
from demo_model.tokenizer import load_tokenizer, train_tokenizer
from demo_model.train import Limits, Trainer, TrainingSettings, open_trainer, train

TINY = TrainingSettings(
    tokens_per_batch=512,
    warmup_steps=4,
    shape=ModelShape(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=64),
)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(num_documents=1500).save(str(path))
    return path


def new_run(folder: Path, tokenizer_path: Path) -> Trainer:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    return open_trainer(folder, TINY)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {**trainer.state().weights, **{f"average/{k}": v for k, v in trainer.state().average.items()}}


def test_a_run_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path, tokenizer_path: Path) -> None:
    # 1. One run of six steps without a stop.
    whole = new_run(tmp_path / "whole", tokenizer_path)
    train(whole, Limits(steps=6))
    # 2. The same run, stopped after three steps; the process is gone, only the folder is left.
    train(new_run(tmp_path / "parts", tokenizer_path), Limits(steps=3))
    # 3. Another process goes on.
    resumed = open_trainer(tmp_path / "parts", TrainingSettings(seed=99), resume=True)
    assert resumed.step == 3
    train(resumed, Limits(steps=6))
    # 4. Nothing differs.
    assert resumed.num_tokens == whole.num_tokens
    assert all(torch.equal(weights_of(resumed)[name], tensor) for name, tensor in weights_of(whole).items())
    optimised = whole.state().optimiser
    assert optimised.keys() == resumed.state().optimiser.keys()
    assert all(torch.equal(resumed.state().optimiser[name], tensor) for name, tensor in optimised.items())


def test_a_run_is_not_overwritten_without_resume(tmp_path: Path, tokenizer_path: Path) -> None:
    train(new_run(tmp_path / "run", tokenizer_path), Limits(steps=1))
    with pytest.raises(SystemExit, match="--resume"):
        open_trainer(tmp_path / "run", TINY)


def test_only_the_newest_whole_state_is_kept_and_nothing_is_pickled(tmp_path: Path, tokenizer_path: Path) -> None:
    trainer = new_run(tmp_path / "run", tokenizer_path)
    for _ in range(2):
        trainer.take_step()
        trainer.folder.save_state(trainer.state())
    assert [path.name for path in (tmp_path / "run").glob("state-*")] == ["state-2"]
    assert (tmp_path / "run" / "LATEST").read_text() == "state-2\n"
    kinds = {path.suffix for path in (tmp_path / "run" / "state-2").iterdir()}
    assert kinds == {".safetensors", ".json"}


def test_a_cool_down_starts_from_another_run_and_leaves_it_alone(tmp_path: Path, tokenizer_path: Path) -> None:
    train(new_run(tmp_path / "run", tokenizer_path), Limits(steps=5))
    before = (tmp_path / "run" / "LATEST").read_text()
    cooled = open_trainer(tmp_path / "cooled", TINY, start_from=tmp_path / "run", cool_down=3)
    train(cooled, Limits())
    assert cooled.step == 8
    assert cooled.schedule.learning_rate(7) < 0.5 * cooled.schedule.learning_rate(4)
    assert (tmp_path / "run" / "LATEST").read_text() == before


def test_the_learning_rate_warms_up_stays_and_falls_only_when_told() -> None:
    assert Schedule(1.0, 10).learning_rate(0) == pytest.approx(0.1)
    assert Schedule(1.0, 10).learning_rate(1_000_000) == 1.0
    falling = Schedule(1.0, 10, cool_down_start=100, cool_down_steps=10)
    assert falling.learning_rate(99) == 1.0
    assert falling.learning_rate(105) == pytest.approx(0.5)
    assert falling.end == 110


def test_the_loss_falls_and_is_logged_as_json_lines(tmp_path: Path, tokenizer_path: Path) -> None:
    trainer = new_run(tmp_path / "run", tokenizer_path)
    train(trainer, Limits(steps=30))
    records = [json.loads(line) for line in trainer.folder.loss_path.read_text().splitlines()]
    assert [record["step"] for record in records] == [10, 20, 30]
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_batch_depends_on_its_number_alone_and_trains_replies_only(tokenizer_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_path)
    stream = BatchStream(ChatEncoder(tokenizer), seed=1, tokens_per_batch=1024)
    batch = stream.batch(5)
    again = BatchStream(ChatEncoder(tokenizer), seed=1, tokens_per_batch=1024).batch(5)
    assert torch.equal(batch.token_ids, again.token_ids)
    flat = batch.token_ids.flatten()
    is_real = batch.targets != IGNORED_TARGET
    assert torch.equal(flat[batch.positions + 1][is_real], batch.targets[is_real])
    assert tokenizer.token_to_id("<|im_start|>") not in batch.targets


def test_documents_in_one_row_do_not_see_one_another(tokenizer_path: Path) -> None:
    model = DemoModel(TINY.shape)
    token_ids = torch.randint(3, 3072, (1, 64), generator=torch.Generator().manual_seed(0))
    owners = torch.tensor([[0] * 40 + [1] * 24])
    other = token_ids.clone()
    other[0, :40] = 5
    with torch.no_grad():
        first = model.hidden_states(token_ids, owners)[40:]
        second = model.hidden_states(other, owners)[40:]
    torch.testing.assert_close(first, second)


def test_an_export_computes_what_the_trained_model_computes(tmp_path: Path, tokenizer_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = new_run(tmp_path / "run", tokenizer_path)
    train(trainer, Limits(steps=4))
    assert export(tmp_path / "run", tmp_path / "package", averaged=False) == 4
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "package", dtype=torch.float32)
    rounded = DemoModel(TINY.shape)
    rounded.load_state_dict({n: w.to(torch.bfloat16).float() for n, w in trainer.model.state_dict().items()})
    token_ids = torch.arange(3, 93)[None]
    with torch.no_grad():
        states = rounded.hidden_states(token_ids, torch.zeros_like(token_ids))
        expected = states @ rounded.model.embed_tokens.weight.T
        torch.testing.assert_close(loaded(token_ids).logits[0], expected, rtol=1e-4, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "package")) == 3072
    assert RunFolder(tmp_path / "run").load_state().step == 4
