"""Tests of the events that a reader receives."""

from __future__ import annotations

from kv_transfer_svc.handle_record import HandleRecord
from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv_handle import HandleMachine
from tests.kv_transfer_svc.layout import a_layout


async def test_slabs_sealed_while_another_is_being_sent_are_sent_before_the_close() -> None:
    record = HandleRecord(pb.KvHandle(), HandleMachine("h", 1, 100.0), layout=a_layout())
    record.machine.reserve(0.0, "w", 10.0)
    record.machine.seal(0.0, [kv.Slab(index=0, num_blocks=1)])
    events = record.events(a_layout(), 0)
    assert (await anext(events)).slab.index == 0
    record.machine.seal(0.0, [kv.Slab(index=1, first_block=1, num_blocks=1)], kv.Closed(num_blocks=2))
    assert (await anext(events)).slab.index == 1
    assert (await anext(events)).closed.num_slabs == 2


async def test_a_handle_that_ends_while_a_slab_is_being_sent_is_not_closed() -> None:
    record = HandleRecord(pb.KvHandle(), HandleMachine("h", 1, 100.0), layout=a_layout())
    record.machine.reserve(0.0, "w", 10.0)
    slabs = [kv.Slab(index=0, num_blocks=1), kv.Slab(index=1, first_block=1, num_blocks=1)]
    record.machine.seal(0.0, slabs, kv.Closed(num_blocks=2))
    events = record.events(a_layout(), 0)
    assert (await anext(events)).slab.index == 0
    record.machine.release_all()
    record.changed.fire()
    assert (await anext(events)).error.code == pb.ERROR_CODE_KV_NOT_FOUND
