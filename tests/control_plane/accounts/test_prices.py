"""A request costs what the price table says."""

from __future__ import annotations

import pytest

from control_plane.accounts.prices import DEFAULT_PRICES, FREE, Price, PriceTable
from control_plane.api.openai.responses import usage_json
from control_plane.generation import PhaseWork, Usage
from control_plane.settings import ControlPlaneSettings
from tandem_runtime.model_table import ModelTable


def test_neurons_are_dollars_by_cloudflares_unit() -> None:
    gemma = Price(0.10, 0.10, 0.30)  # 9,091 and 27,273 neurons for a million tokens
    assert round(gemma.microneurons(Usage(10**6, 10**6, 0, 0)) / 1e6) == 9091
    assert round(gemma.microneurons(Usage(0, 0, 0, 10**6)) / 1e6) == 27273
    usage = Usage(147, 147, 0, 16)
    assert gemma.microneurons(usage) / 1e6 == 1.772727


def test_cached_tokens_have_a_price_of_their_own() -> None:
    price = Price(0.95, 0.16, 4.0)
    assert price.microneurons(Usage(100, 40, 60, 5)) == round((40 * 0.95 + 60 * 0.16 + 5 * 4.0) / 0.000011)


def test_a_table_names_models_and_all_others() -> None:
    table = PriceTable.parse(["@cf/x=1/0.5/2", "*=0.1/0/0.3"])
    assert table.of("@cf/x") == Price(1, 0.5, 2) and table.of("y") == Price(0.1, 0, 0.3)
    assert PriceTable.parse(["a=b=1/1/1"]).of("a=b") == Price(1, 1, 1) and PriceTable().of("z") == FREE
    assert PriceTable.parse(DEFAULT_PRICES).of("anything") != FREE


@pytest.mark.parametrize("entry", ["x", "x=1", "x=1/2", "x=1/2/y", "=1/2/3", "x=-1/2/3", "x=nan/1/1", "x=1/2/3/4"])
def test_what_is_no_price_is_refused_at_start(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a price"):
        ControlPlaneSettings(prices=(entry,))
    with pytest.raises(ValueError, match="'x' twice"):
        PriceTable.parse(["x=1/1/1", "x=1/1/1"])


def test_usages_add_up() -> None:
    one = Usage(10, 6, 4, 2, PhaseWork(num_store_tokens=4, decode_us=7), 100)
    two = Usage(5, 5, 0, 1, PhaseWork(decode_us=3), 50)
    assert one + two == Usage(15, 11, 4, 3, PhaseWork(num_store_tokens=4, decode_us=10), 150)
    assert (Usage(1, 1, 0, 1) + Usage(1, 1, 0, 1)).microneurons is None
    assert usage_json(one)["neurons"] == 0.0001 and "neurons" not in usage_json(Usage(1, 1, 0, 1))


def test_prices_of_models_come_from_tandem_toml_unless_prices_names_them() -> None:
    cost = {"input": 1, "cached_input": 0.5, "output": 2}
    models = ModelTable.from_toml({"a": {"source": "o/a", "aliases": ["b"], "prices": cost}, "c": {"prices": cost}})
    table = PriceTable.parse(["c=9/9/9", "*=0.1/0/0.3"]).over(models)
    assert [table.of(name) for name in ("a", "b", "o/a")] == [Price(1.0, 0.5, 2.0)] * 3
    assert table.of("c") == Price(9, 9, 9) and table.of("@tandem/demo") == Price(0.1, 0, 0.3)


def test_a_price_is_not_that_of_other_versions_of_a_checkpoint() -> None:
    cost = {"input": 1, "cached_input": 0.5, "output": 2}
    pinned = ModelTable.from_toml({"a": {"source": "o/a", "revision": "v1", "prices": cost}})
    shipped = ModelTable.from_toml({"mine": {"source": "meta-llama/Llama-3.1-8B-Instruct", "prices": cost}})
    assert PriceTable.parse([]).over(pinned).of("a") == Price(1, 0.5, 2)
    assert PriceTable.parse([]).over(pinned).of("o/a") == FREE
    assert PriceTable.parse([]).over(shipped).of("meta-llama/Llama-3.1-8B-Instruct") == Price(1, 0.5, 2)
