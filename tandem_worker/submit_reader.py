"""Checks that a Submit is meant for this worker, and takes its hashes and handle over."""

from __future__ import annotations

from tandem.v1 import types_pb2 as pb
from tandem_engine.messages import ChainEnd
from tandem_runtime.errors import FingerprintMismatch
from tandem_runtime.kv.layout import layout_digest
from tandem_runtime.kv.spaces import space_of
from tandem_worker.model_card import check_adapter, check_model
from tandem_worker.prompt_keys import take_hashes


class SubmitReader:
    """Reads the Submits for a worker with this card. Its errors leave the request to other workers."""

    def __init__(self, card: pb.ModelCard) -> None:
        self._card = card
        self.space = space_of(card)
        self._layout_digest = layout_digest(card.layout)

    def read(self, submit: pb.Submit) -> ChainEnd | None:
        """Check a Submit, and replace its hashes by this worker's keys; called once for each Submit.

        Returns where the chain of hashes goes on; None if the hashes were keys. Raises ModelNotFound,
        FingerprintMismatch, InvalidRequest.
        """
        check_model(self._card, submit.model)
        if submit.HasField("adapter"):
            check_adapter(self._card, submit.adapter)
        chain = take_hashes(submit, self.space, self._card.block_size)
        if submit.HasField("handle"):
            self._check_handle(submit)
        return chain

    def _check_handle(self, submit: pb.Submit) -> None:
        """Raise FingerprintMismatch unless this worker may read, or fill, the blocks under the handle.

        Under "class" they are those of an equal worker. Under "layout" the writer may compute otherwise, if the gateway
        states that both share a space, and its blocks may have the layout that the gateway states: a decode worker
        checks and converts that.
        """
        handle, own = submit.handle, self._card.fingerprint.digest
        is_shared = self._card.exactness == "layout" and submit.space == self.space
        if handle.model.fingerprint != own and not is_shared:
            raise FingerprintMismatch(
                f"the KV handle is for fingerprint {handle.model.fingerprint.hex()}, this worker has {own.hex()}; "
                'choose both workers of one numerics class, or give their model exactness "layout"',
                field="handle.model.fingerprint",
            )
        if handle.layout_digest != self._layout_digest and not (is_shared and submit.HasField("handle_layout")):
            raise FingerprintMismatch(
                f"the KV handle is for blocks of layout {handle.layout_digest.hex()}, this worker's is "
                f"{self._layout_digest.hex()}; choose both workers of one KV layout",
                field="handle.layout_digest",
            )
