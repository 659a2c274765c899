"""A model's name leads to its checkpoint, and a wrong table is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane.settings import ControlPlaneSettings
from tandem_runtime.model_table import SHIPPED, ModelPrices, ModelTable
from tandem_runtime.settings import load_settings
from tandem_worker.settings import WorkerSettings

LLAMA = "@cf/meta/llama-3.1-8b-instruct"
TABLE = f"""
[models."{LLAMA}"]
source = "/models/llama"
dtype = "bfloat16"
exactness = "layout"

[models."mine"]
source = "org/model"
revision = "v2"
aliases = ["@cf/qwen/qwq-32b", "my-model"]
wire_format = "openai"
prices = {{ input = 1, cached_input = 0.5, output = 2 }}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tandem.toml"
    path.write_text(TABLE)
    return path


def test_the_shipped_names_are_distinct_and_name_hub_ids() -> None:
    names = [name for entry in SHIPPED.entries for name in entry.names]
    assert len(names) == len(set(names)) and all(name.startswith(("@cf/", "@hf/")) for name in names)
    assert all(entry.source.count("/") == 1 and entry.source[0] not in "@./" for entry in SHIPPED.entries)
    encoders = [name for name in names if not SHIPPED.writes_text(name)]
    assert "@cf/baai/bge-m3" in encoders and len(encoders) == 8
    assert not SHIPPED.writes_text("@cf/openai/whisper-large-v3-turbo")


def test_a_worker_takes_source_revision_and_dtype_from_the_table(config: Path) -> None:
    def engine(*flags: str) -> tuple[str, str, str, str]:
        settings = load_settings(WorkerSettings, "decode", ["--config", str(config), *flags])
        made = settings.engine_config("", "")
        return made.model, made.revision, made.served_model_name, made.dtype

    assert engine("--model", "mine") == ("org/model", "v2", "mine", "auto")
    assert engine("--model", "my-model") == ("org/model", "v2", "mine", "auto")
    assert engine("--model", LLAMA) == ("/models/llama", "", LLAMA, "bfloat16")
    assert engine("--model", LLAMA, "--dtype", "float32", "--served-model-name", "x")[2:] == ("x", "float32")
    assert engine("--model", "other/model") == ("other/model", "", "", "auto")
    shipped = "@cf/meta/llama-3.2-1b-instruct"
    assert engine("--model", shipped) == ("meta-llama/Llama-3.2-1B-Instruct", "", shipped, "auto")


def test_a_worker_takes_exactness_from_the_table_unless_a_flag_states_it(config: Path) -> None:
    def exactness(*flags: str) -> str:
        return load_settings(WorkerSettings, "prefill", ["--config", str(config), *flags]).resolved_exactness

    assert exactness("--model", LLAMA) == "layout"
    assert exactness("--model", LLAMA, "--exactness", "class") == "class"
    assert exactness("--model", "mine") == exactness("--model", "other/model") == "class"
    assert exactness("--model", "other/model", "--exactness", "layout") == "layout"


def test_what_tandem_toml_says_goes_before_what_is_shipped(config: Path) -> None:
    models = load_settings(ControlPlaneSettings, "control", ["--config", str(config)]).models
    changed = models.find(f"{LLAMA}-fp8")
    assert changed is not None and (changed.name, changed.source) == (LLAMA, "/models/llama")
    taken = models.find("@cf/qwen/qwq-32b")
    assert taken is not None and (taken.name, taken.prices) == ("mine", ModelPrices(1.0, 0.5, 2.0))
    assert len([entry for entry in models.entries if "@cf/qwen/qwq-32b" in entry.names]) == 1


def test_a_loaded_model_answers_to_its_names_by_name_and_by_source() -> None:
    gemma = "@hf/google/gemma-7b-it"
    assert SHIPPED.names_of("google/gemma-7b-it") == (gemma, "@cf/google/gemma-7b-it-lora")
    assert SHIPPED.names_of(gemma) == ("@cf/google/gemma-7b-it-lora",)
    assert SHIPPED.names_of("@tandem/demo") == ()
    described = SHIPPED.describes("openai/gpt-oss-20b")
    assert described is not None and described.wire_format == "openai"
    one_version = ModelTable.from_toml({"pinned": {"source": "a/b", "revision": "v1"}})
    assert one_version.names_of("a/b") == ()  # another revision of the same Hub id is another model


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ("models = 1", "give a table for each model"),
        ("[models]\nx = 1", "x is no table"),
        ("[models.x]\nsauce = 'a'", "has sauce; it knows aliases, dtype, exactness"),
        ("[models.x]\nsource = 1", 'source of [models."x"] is 1; give a text'),
        ("[models.x]\ndtype = 'int8'", "choose one of auto, float32"),
        ("[models.x]\nexactness = 'exact'", "choose one of class, layout"),
        ("[models.x]\nwire_format = 'xml'", "choose one of native, openai"),
        ("[models.x]\nprices = { input = 1 }", "give US dollars for a million tokens"),
        ("[models.x]\naliases = ['y']\n[models.y]", "two models are called 'y'"),
    ],
)
def test_a_table_that_does_not_fit_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, complaint: str
) -> None:
    path = tmp_path / "tandem.toml"
    path.write_text(said)
    with pytest.raises(SystemExit):
        load_settings(ControlPlaneSettings, "control", ["--config", str(path)])
    told = capsys.readouterr().err
    assert complaint in told and f"models of {path}" in told


def test_the_table_is_neither_a_flag_nor_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_MODELS", "whatever")
    assert load_settings(ControlPlaneSettings, "control", []).models is SHIPPED
    with pytest.raises(SystemExit):
        load_settings(ControlPlaneSettings, "control", ["--models", "x"])
