"""Maps model names to checkpoints and per-model settings of tandem.toml.

    [models."@cf/meta/llama-3.1-8b-instruct"]
    source = "/models/llama"            a folder or a Hub id; default: the shipped table's
    revision = "0e9e39f"                of a Hub id: branch, tag or commit
    dtype = "bfloat16"                  compute dtype: auto, float32, bfloat16 or float16
    exactness = "layout"                workers that share KV blocks: class (equal bits) or layout (equal shapes)
    aliases = ["llama"]                 other names for it
    wire_format = "openai"              format of AI.run and /ai/run: native or openai
    prices = { input = 0.1, cached_input = 0.02, output = 0.3 }    US dollars for a million tokens each

`tandem_runtime/models.toml` ships with Tandem in the same form; an entry of tandem.toml overrides the keys it names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import Any, Literal, cast

WireFormat = Literal["native", "openai"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Exactness = Literal["class", "layout"]
"""class: workers of one numerics class and KV layout share blocks. layout: all whose layouts can be converted."""


@dataclass(frozen=True)
class ModelPrices:
    """US dollars for a million tokens each."""

    input: float
    cached_input: float
    output: float


@dataclass(frozen=True)
class ModelEntry:
    """Facts about one model that are known before a worker loads it."""

    name: str
    source: str = ""
    """A folder or a Hub id; "": the name itself."""
    revision: str = ""
    """Branch, tag or commit of a Hub id; "": its main branch."""
    dtype: DType = "auto"
    exactness: Exactness = "class"
    aliases: tuple[str, ...] = ()
    wire_format: WireFormat | None = None
    """None: native."""
    prices: ModelPrices | None = None
    """None: the price of all other models."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class ModelTable:
    """The named models. A name of tandem.toml wins over the same name in the shipped table."""

    entries: tuple[ModelEntry, ...] = ()
    other_tasks: tuple[str, ...] = ()
    """Beginnings of the names of models that write no text."""
    _by_name: Mapping[str, ModelEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Later entries are tandem.toml's; a name wins over an alias.
        aliases = {alias: entry for entry in self.entries for alias in entry.aliases}
        object.__setattr__(self, "_by_name", aliases | {entry.name: entry for entry in self.entries})

    @classmethod
    def from_toml(cls, value: Any) -> ModelTable:
        """Read the file's table `models` over the shipped one; raises ValueError with the remedy."""
        return _merged(SHIPPED, _read(value))

    def find(self, name: str) -> ModelEntry | None:
        """Return the model with this name or alias."""
        return self._by_name.get(name)

    def names_of(self, model_id: str) -> tuple[str, ...]:
        """Return the other names of a model that was loaded as `model_id`: a name of this table, or a Hub id."""
        named = self.find(model_id)
        of_source = [entry for entry in self.entries if entry.source == model_id and not entry.revision]
        found = [name for entry in (*([named] if named else []), *of_source) for name in entry.names]
        return tuple(name for name in dict.fromkeys(found) if name != model_id)

    def describes(self, model_id: str) -> ModelEntry | None:
        """Return the entry of a model that was loaded as `model_id`."""
        names = (model_id, *self.names_of(model_id))
        return next((entry for name in names if (entry := self.find(name)) is not None), None)

    def writes_text(self, name: str) -> bool:
        """Return False for names of models known to do another task (embeddings, images, speech, ...)."""
        return not name.startswith(self.other_tasks)

    def __str__(self) -> str:
        return f"{len(self.entries)} models"


def _merged(shipped: ModelTable, own: Mapping[str, Mapping[str, Any]]) -> ModelTable:
    shipped_entries = {entry.name: entry for entry in shipped.entries}
    own_names = {name for name, values in own.items() for name in (name, *values.get("aliases", ()))}
    kept = [
        replace(entry, aliases=tuple(alias for alias in entry.aliases if alias not in own_names))
        for entry in shipped.entries
        if entry.name not in own_names
    ]
    made = [replace(shipped_entries.get(name, ModelEntry(name)), **values) for name, values in own.items()]
    return ModelTable((*kept, *made), shipped.other_tasks)


def _read(value: Any) -> dict[str, dict[str, Any]]:
    """Return the fields of each model."""
    if not isinstance(value, dict):
        raise ValueError('give a table for each model: [models."NAME"]')
    found = {name: _read_entry(name, values) for name, values in value.items()}
    _refuse_doubles(found)
    return found


def _read_entry(name: str, values: Any) -> dict[str, Any]:
    if not name or not isinstance(values, dict):
        raise ValueError(f'{name or "a model without a name"} is no table; write [models."NAME"]')
    if unknown := sorted(values.keys() - _READERS.keys()):
        raise ValueError(f'[models."{name}"] has {", ".join(unknown)}; it knows {", ".join(sorted(_READERS))}')
    return {key: _read_field(name, key, each) for key, each in values.items()}


def _read_field(name: str, key: str, value: Any) -> Any:
    try:
        return _READERS[key](value)
    except ValueError as error:
        raise ValueError(f'{key} of [models."{name}"] is {value!r}; {error}') from None


def _refuse_doubles(found: Mapping[str, Mapping[str, Any]]) -> None:
    seen: set[str] = set()
    for name, values in found.items():
        for each in (name, *values.get("aliases", ())):
            if each in seen:
                raise ValueError(f"two models are called {each!r}; a name or alias is one model's")
            seen.add(each)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("give a text")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("give a list of texts")
    return tuple(_text(each) for each in value)


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"choose one of {', '.join(choices)}")
        return cast(str, value)

    return read


def _prices(value: Any) -> ModelPrices:
    names = [each.name for each in fields(ModelPrices)]
    is_whole = isinstance(value, dict) and value.keys() == set(names)
    numbers: list[Any] = [value[name] for name in names] if is_whole else []
    if not numbers or not all(type(each) in (int, float) and 0 <= each < 1e6 for each in numbers):
        raise ValueError("give US dollars for a million tokens: { input = 0.1, cached_input = 0.02, output = 0.3 }")
    return ModelPrices(*map(float, numbers))


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "source": _text,
    "revision": _text,
    "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "exactness": _one_of("class", "layout"),
    "aliases": _texts,
    "wire_format": _one_of("native", "openai"),
    "prices": _prices,
}


def _read_shipped() -> ModelTable:
    content = tomllib.loads(resources.files("tandem_runtime").joinpath("models.toml").read_text(encoding="utf-8"))
    return _merged(ModelTable(other_tasks=tuple(content["other_tasks"])), _read(content["models"]))


SHIPPED = _read_shipped()
