"""Checks the layout of a handle's blocks, which may differ from this worker's, and describes it to the engine.

Without `Submit.handle_layout` the blocks have this worker's layout, and the KV service refuses any other. Blocks of
another layout of the family are converted by the engine as it imports them. All else is refused. A worker without
exactness "layout" never gets here with another layout (`tandem_worker.submit_reader`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import SourceLayout
from tandem_runtime.errors import FingerprintMismatch
from tandem_runtime.kv.layout import check_layout, layout_digest
from tandem_runtime.kv.spaces import common_part


@dataclass(frozen=True)
class HandleLayout:
    """The layout of a handle's blocks."""

    layout: pb.KvLayout
    source: SourceLayout | None
    """For the engine; None: it is the engine's own."""

    def first_block(self, num_cached_tokens: int) -> int:
        """Return the first of the handle's blocks with a token that the engine lacks."""
        return num_cached_tokens // self.layout.groups[0].tokens_per_block


def handle_layout(submit: pb.Submit, ours: pb.KvLayout) -> HandleLayout:
    """Return the layout of the blocks of a request's handle; raises FingerprintMismatch, which names the field."""
    theirs = submit.handle_layout
    if not submit.HasField("handle_layout"):
        return HandleLayout(ours, None)
    if layout_digest(theirs) != submit.handle.layout_digest:
        raise FingerprintMismatch(
            f"handle_layout has digest {layout_digest(theirs).hex()}, the handle {submit.handle.layout_digest.hex()}",
            field="handle_layout",
        )
    if theirs == ours:
        return HandleLayout(ours, None)
    _check_family(ours, theirs)
    return HandleLayout(theirs, _source(theirs))


def _check_family(ours: pb.KvLayout, theirs: pb.KvLayout) -> None:
    try:
        check_layout(common_part(ours), common_part(theirs))
    except FingerprintMismatch as error:
        field = f"handle_{error.field}"
        raise FingerprintMismatch(f"{error.message}; such blocks cannot be converted", field=field) from error


def _source(layout: pb.KvLayout) -> SourceLayout:
    first = layout.groups[0]
    for name in ("tokens_per_block", "dtype", "order", "bytes_per_block"):
        for index, group in enumerate(layout.groups):
            if getattr(group, name) != getattr(first, name):
                raise FingerprintMismatch(
                    f"group {index} of the handle's layout has {name} {getattr(group, name)}, group 0 "
                    f"{getattr(first, name)}; only blocks of one form are converted",
                    field=f"handle_layout.groups[{index}].{name}",
                )
    return SourceLayout(first.tokens_per_block, first.dtype, first.order, first.bytes_per_block)
