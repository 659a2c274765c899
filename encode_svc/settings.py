"""The settings of an encode worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from tandem_engine.settings import EngineConfig
from tandem_runtime.settings import setting
from tandem_worker.settings import EngineSettings

_STEP_TOKENS = 2048
_BACKGROUND_STEP_TOKENS = 64


@dataclass(frozen=True)
class EncodeSettings(EngineSettings):
    """Settings of an encode worker."""

    model: str = setting(
        "", "model to serve: folder or Hub id of an encoder's checkpoint, or a name from the model table; needed"
    )
    served_model_name: str = setting("", "model name for clients; the folder name or Hub id if empty")
    max_model_len: int | None = setting(None, "most tokens of one input; the model's limit if unset")
    max_num_batched_tokens: int | None = setting(
        None,
        "tokens of all inputs of one step; a longer input has a step of its own; if unset, 2,048, or 64 with "
        "--background",
    )
    max_num_waiting: int = setting(256, "most calls in the queue; further calls are refused with 429")

    background: bool = setting(
        False, "let all other processes of the machine compute first: for an engine that shares its cores"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ValueError("--model is missing; give the folder, the Hub id or the name of an encoder's checkpoint")

    @property
    def num_step_tokens(self) -> int:
        """Tokens of one step. Answers of a long step come at once, and their clients' next requests with them.

        Streams of the same machine wait for those in the gateway.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return _BACKGROUND_STEP_TOKENS if self.background else _STEP_TOKENS

    def engine_config(self, state_dir: str, region_id: str) -> EngineConfig:
        whole = replace(self, max_num_batched_tokens=self.num_step_tokens)
        config = super(EncodeSettings, whole).engine_config(state_dir, region_id)
        return msgspec.structs.replace(config, encodes=True, is_background=self.background)
