"""Each gateway hears what the requests of the others have used, at most once a second."""

from __future__ import annotations

from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_worker.other_use import _MAX_ACCOUNTS, OtherUse
from tandem_worker.requests import GatewayStream
from tests.tandem_worker.scripted_engine import output, step
from tests.tandem_worker.test_front import harness, submit


def heard(use: OtherUse[Any]) -> dict[Any, list[tuple[str, int, int]]]:
    return {stream: counts(event) for stream, event in use.due()}


def counts(event: pb.Event) -> list[tuple[str, int, int]]:
    return [
        (each.fairness_key, each.num_computed_tokens, each.num_sampled_tokens) for each in event.used_elsewhere.accounts
    ]


def test_a_gateway_hears_of_the_others_and_not_of_itself() -> None:
    now = 100.0
    use = OtherUse[str](clock=lambda: now)
    for stream in ("one", "two"):
        use.tell(stream)
    use.used("one", "a", 7, 2)
    use.used("one", "a", 0, 1)
    use.used("two", "b", 0, 5)
    use.used("of the release before", "a", 0, 10)
    use.used("two", "", 9, 9)
    use.used("two", "c", 0, 0)
    assert heard(use) == {}, "no second has passed"
    now += 1.0
    assert heard(use) == {"one": [("b", 0, 5), ("a", 0, 10)], "two": [("a", 7, 13)]}
    now += 1.0
    assert heard(use) == {}, "nothing new"
    use.used("two", "b", 0, 1)
    use.forget("one")
    assert heard(use) == {}


def test_a_bounded_number_of_accounts_waits_to_be_told_of() -> None:
    now = 0.0
    use = OtherUse[str](clock=lambda: now)
    use.tell("one")
    for number in range(_MAX_ACCOUNTS + 5):
        use.used("two", f"account-{number}", 0, 1)
    now += 1.0
    (accounts,) = heard(use).values()
    assert len(accounts) == _MAX_ACCOUNTS and accounts[0][0] == "account-5"


async def test_a_worker_tells_what_its_engine_has_done_for_another_gateway() -> None:
    now = 0.0
    async with harness() as here:
        use = here.front.other_use = OtherUse[GatewayStream](clock=lambda: now)
        one, other = GatewayStream(), GatewayStream()
        for stream in (one, other):
            here.front.attach(stream)
            use.tell(stream)
        here.front.submit(one, submit("r", fairness_key="a"))
        now = 2.0
        here.engine.emit(step([output("r.0", 3, [7, 8])]))
        events = other.events()
        assert counts(await anext(events)) == [("a", 0, 2)]
        here.front.detach(other)
        assert heard(use) == {}
