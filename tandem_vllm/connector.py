"""vLLM's side of hand-overs: an out-of-tree KV connector (vllm/distributed/kv_transfer/kv_connector/v1/base.py).

vLLM makes two: one for its scheduler, which asks `Arrivals`, and one for its worker, which gets the pool's tensors.
Both are in this process, so no metadata has to travel between them, and nothing is copied inside a step.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from tandem_engine.execution.huge_pages import take_pages
from tandem_vllm.arrivals import Arrivals


class TandemConnector(KVConnectorBase_V1):
    """Blocks that `Arrivals` has, as external tokens of vLLM's requests."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.arrivals: Arrivals | None = None
        """Set once the pool is known."""
        self.layers: dict[str, torch.Tensor] = {}
        """The pool: a tensor per layer, for the worker's connector."""

    # ------------------------------------------------------------------------------------------- scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.arrivals is None:
            return 0, False
        return self.arrivals.num_matched_tokens(request.request_id, num_computed_tokens, request.num_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.arrivals is not None:
            self.arrivals.placed(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    # ---------------------------------------------------------------------------------------------- worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.layers = kv_caches
        for layer in kv_caches.values():
            if layer.device.type == "cpu":
                take_pages(layer.data_ptr(), layer.numel() * layer.element_size())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is left to load: `placed` has written it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are copied out between steps, once they are complete."""

    def wait_for_save(self) -> None:
        """Nothing is being saved."""


def pool_layers() -> dict[str, torch.Tensor]:
    """Return the tensors of vLLM's pool in this process, by the name of their layer."""
    connector = get_kv_transfer_group()
    assert isinstance(connector, TandemConnector), f"vLLM's worker has another connector: {connector}"
    return connector.layers
