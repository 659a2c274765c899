"""A step's tokens: many where the worker has its cores, few where others share them."""

from __future__ import annotations

import pytest

from encode_svc.settings import EncodeSettings


@pytest.mark.parametrize(
    ("background", "tokens", "expected"), [(False, None, 2048), (True, None, 64), (True, 512, 512), (False, 64, 64)]
)
def test_a_background_worker_answers_few_calls_at_once_unless_told_otherwise(
    background: bool, tokens: int | None, expected: int
) -> None:
    settings = EncodeSettings(model="m", background=background, max_num_batched_tokens=tokens)
    config = settings.engine_config("state", "region")
    assert (config.max_num_batched_tokens, config.is_background) == (expected, background)
