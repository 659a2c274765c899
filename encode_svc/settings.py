"""The settings of an encode worker."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tandem_engine.settings import EngineConfig
from tandem_runtime.settings import setting
from tandem_worker.settings import EngineSettings


@dataclass(frozen=True)
class EncodeSettings(EngineSettings):
    """Settings of an encode worker."""

    model: str = setting(
        "", "model to serve: folder or Hub id of an encoder's checkpoint, or a name from the model table; needed"
    )
    served_model_name: str = setting("", "model name for clients; the folder name or Hub id if empty")
    max_model_len: int | None = setting(None, "most tokens of one input; the model's limit if unset")
    max_num_batched_tokens: int = setting(
        2048, "tokens of all inputs of one step; a longer input has a step of its own"
    )
    max_num_waiting: int = setting(256, "most calls in the queue; further calls are refused with 429")

    background: bool = setting(
        False, "let all other processes of the machine compute first: for an engine that shares its cores"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("--model is missing; give the folder, the Hub id or the name of an encoder's checkpoint")

    def engine_config(self, state_dir: str, region_id: str) -> EngineConfig:
        return msgspec.structs.replace(
            super().engine_config(state_dir, region_id), encodes=True, is_background=self.background
        )
