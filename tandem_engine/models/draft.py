"""Loads a draft model and checks that it fits its target."""

from __future__ import annotations

from msgspec.structs import replace

from tandem_engine.errors import ModelUnusable
from tandem_engine.models.checkpoint import Progress
from tandem_engine.models.loader import LoadedModel, load_model
from tandem_engine.settings import EngineConfig


def load_draft_model(
    config: EngineConfig, target: LoadedModel, report: Progress, numa_node: int | None = None
) -> LoadedModel:
    """Load `config.draft_model` as `load_model` does; raises ModelUnusable if its tokens differ from the target's."""
    own = replace(config, model=config.draft_model, revision="", served_model_name="", draft_model="")
    try:
        draft = load_model(
            own, lambda stage, fraction: report(f"draft model: {stage}", 0.6 + 0.3 * fraction), target, numa_node
        )
    except ModelUnusable as error:
        raise ModelUnusable(f"--draft-model {config.draft_model}: {error}") from error
    names = f"{draft.info.model_id} cannot draft for {target.info.model_id}"
    remedy = "give another --draft-model, or leave it out"
    if draft.info.vocab_size != target.info.vocab_size:
        sizes = f"{draft.info.vocab_size:,} tokens, the target's {target.info.vocab_size:,}"
        raise ModelUnusable(f"{names}: its vocabulary has {sizes}; {remedy}")
    if draft.info.tokenizer_digest != target.info.tokenizer_digest:
        raise ModelUnusable(f"{names}: their tokenizer.json and tokenizer_config.json differ; {remedy}")
    return draft
