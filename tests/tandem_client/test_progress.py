"""`tandem up` finds its processes in the fleet by their names, whatever ids their certificates have."""

from __future__ import annotations

from typing import Any

from tandem_client.cli.fleet import parse_fleet
from tandem_client.cli.plan import ProcessSpec
from tandem_client.cli.progress import stages


def an_entry(id: str, role: str, state: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "role": role, "state": state, **more}


def test_processes_are_found_by_name_then_by_role() -> None:
    specs = [ProcessSpec(name, role, ()) for name, role in (("decode-0", "decode"), ("decode-1", "decode"))]
    members = parse_fleet(
        {
            "data": [
                an_entry("00" * 8, "decode", "loading", name="decode-1", load={"load_stage": "reading_weights"}),
                an_entry("ff" * 8, "decode", "ready", name="decode-0"),
            ]
        }
    )
    shown = stages(specs, members)
    assert (shown["decode-0"].ready, shown["decode-1"].text) == (True, "reading weights")
    unnamed = parse_fleet({"data": [an_entry("00" * 8, "decode", "ready")]})
    assert unnamed[0].name == "00" * 8
    shown = stages(specs, unnamed)
    assert (shown["decode-0"].ready, shown["decode-1"].text) == (True, "starting")
