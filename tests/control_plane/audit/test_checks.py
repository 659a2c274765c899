"""The checks find all memory that is kept without need."""

from __future__ import annotations

import pytest

from control_plane.audit.checks import KINDS
from control_plane.audit.snapshot import AuditedService
from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import (
    ArenaRow,
    LateCopyRow,
    ReaderRow,
    RegionRow,
    StoreLeaseRow,
    UnreportedRow,
)
from tests.control_plane.audit.audit_tables import (
    KV,
    LATER,
    NAME,
    NOW,
    H,
    handle,
    hold,
    one_hand_over,
    pull,
    request,
    seen,
    service,
)
from tests.control_plane.scripted_worker import DECODE, PREFILL


def test_services_that_agree_are_not_suspected() -> None:
    assert seen(*one_hand_over()) == []


def test_blocks_held_for_a_handle_that_the_kv_service_forgot_are_suspected() -> None:
    kv = service("kv", KV)
    assert seen(*one_hand_over(kv=kv, decode=service("decode", DECODE))) == [("unknown_to_kv", "prefill", NAME, 100)]


def test_blocks_held_for_a_kv_service_that_is_gone_are_suspected() -> None:
    prefill = service("prefill", PREFILL, holds=[hold(holder_incarnation="kv-life-before")])
    assert seen(prefill) == [("unknown_to_kv", "prefill", NAME, 100)]


def test_a_handle_of_a_worker_that_is_gone_is_suspected_with_its_region() -> None:
    _, _, decode = one_hand_over()
    kv = service(
        "kv",
        KV,
        handles=[handle()],
        regions=[RegionRow(region_id="region", owner_incarnation="prefill-life", num_bytes=7)],
    )
    assert seen(kv, decode) == [("orphaned_region", "kv", "region", 7), ("owner_gone", "kv", NAME, 100)]


def test_what_no_dispatcher_has_is_suspected_at_each_place() -> None:
    gone = [("request_gone", name, NAME, 100) for name in ("kv", "prefill", "prefill")]
    decodes = ("request_gone", "decode", f"r-0/{H.hex()}", 100)
    assert seen(*one_hand_over(), running=frozenset()) == [decodes, *gone]


def test_another_replicas_requests_are_left_alone_until_their_deadline() -> None:
    theirs = {
        "kv": service("kv", KV, handles=[handle()]),
        "prefill": service("prefill", PREFILL, holds=[hold()], requests=[request("r", gateway_id="another")]),
        "decode": service("decode", DECODE, pulls=[pull()], requests=[request("r-0", gateway_id="another")]),
    }
    assert seen(*theirs.values(), running=frozenset(), is_alone=False) == []
    theirs["prefill"] = service("prefill", PREFILL, holds=[hold(deadline_unix_ms=NOW - 1)])
    assert seen(*theirs.values(), running=frozenset(), is_alone=False) == [("request_gone", "prefill", NAME, 100)]


def test_a_handle_whose_blocks_were_given_up_is_suspected() -> None:
    prefill = service("prefill", PREFILL, requests=[request("r")])
    assert seen(*one_hand_over(prefill=prefill)) == [("not_held", "kv", NAME, 100)]


@pytest.mark.parametrize("decode", [service("another", DECODE), service("decode", DECODE, requests=[request("r-0")])])
def test_a_lease_of_a_reader_that_is_gone_or_knows_nothing_of_it_is_suspected(decode: AuditedService) -> None:
    assert seen(*one_hand_over(decode=decode)) == [("readers_gone", "kv", NAME, 100)]


def test_one_reader_that_is_there_is_reason_enough_to_keep_a_handle() -> None:
    readers = [ReaderRow(reader_id=f"r-{i}", incarnation=who) for i, who in enumerate(("decode-life", "dead", ""))]
    assert seen(*one_hand_over(kv=service("kv", KV, handles=[handle(readers=readers)]))) == []


def test_a_reader_on_another_host_is_its_kv_service_with_a_copy() -> None:
    readers = [ReaderRow(reader_id="r-0", incarnation="far-life")]
    copy = handle(is_copy=True, readers=[ReaderRow(reader_id="r-0", incarnation="decode-life")])
    near = service("kv", KV, handles=[handle(readers=readers)])
    decode = service("decode", DECODE, pulls=[pull(kv_address="far:1")], requests=[request("r-0")])
    far = service("far", KV, handles=[copy], arena=[ArenaRow(handle_id=H, num_bytes=50)], arena_used_bytes=50)
    assert seen(*one_hand_over(kv=near, decode=decode), far) == []
    far = service("far", KV)
    assert seen(*one_hand_over(kv=near, decode=decode), far) == [
        ("pull_without_handle", "decode", f"r-0/{H.hex()}", 100),
        ("readers_gone", "kv", NAME, 100),
    ]


def test_what_a_kv_service_keeps_too_long_by_its_own_word_is_suspected() -> None:
    row = handle(lease_until_unix_ms=NOW - 1)
    kv = service(
        "kv",
        KV,
        handles=[row],
        unreported=[UnreportedRow(handle_id=b"u" * 16, request_id="u", owner_incarnation="prefill-life", num_bytes=20)],
        store_leases=[
            StoreLeaseRow(reader_id="over", lease_until_unix_ms=NOW - 1, num_bytes=30),
            StoreLeaseRow(reader_id="runs", lease_until_unix_ms=LATER, num_bytes=30),
        ],
        late_copies=[LateCopyRow(block="block 1", state="FILLING", num_bytes=40)],
    )
    assert seen(*one_hand_over(kv=kv)) == [
        ("copy_unfinished", "kv", "block 1", 40),
        ("end_undelivered", "kv", f"u/{(b'u' * 16).hex()}", 20),
        ("overdue", "kv", NAME, 100),
        ("store_lease_overdue", "kv", "over", 30),
    ]


def test_arena_memory_that_no_pull_claims_is_suspected() -> None:
    rows = [ArenaRow(handle_id=H, request_id="r", num_bytes=30), ArenaRow(request_id="x", num_bytes=20, has_ended=True)]
    kv = service("kv", KV, arena=rows, arena_used_bytes=60)
    assert seen(kv) == [("arena_kept", "kv", "x/", 20), ("arena_unclaimed", "kv", "arena", 10)]


def test_the_pool_of_a_worker_with_nothing_to_do_must_be_empty() -> None:
    pool = pb.KvPool(num_used_blocks=3, bytes_per_block=10)
    assert seen(service("decode", DECODE, pool=pool, num_requests_so_far=7)) == [
        ("pool_not_empty", "decode", "pool after 7 requests", 30)
    ]
    busy = service("decode", DECODE, pool=pool, requests=[request("r-0")])
    assert seen(busy) == []


def test_every_kind_is_explained() -> None:
    assert all(KINDS.values())
    assert len(KINDS) == 14


def test_nothing_is_concluded_from_a_table_that_is_cut_off_or_did_not_come() -> None:
    for kv in (service("kv", KV, num_left_out=1), None):
        rest = [service("prefill", PREFILL, holds=[hold()]), service("decode", DECODE, pulls=[pull()])]
        assert seen(*([kv] if kv else []), *rest, silent=() if kv else ("kv-life",)) == []
    kv = service("kv", KV, handles=[handle()])
    assert seen(kv, silent=("prefill-life", "decode-life")) == []
