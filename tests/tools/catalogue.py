"""The tools: what is installed, and what each is asked to do.

A task is a script of tests/tools/tasks, or the tool's own command. Both find the address, the model and the folder of
the checkpoint in the environment: TANDEM_URL, TANDEM_MODEL, TANDEM_CHECKPOINT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SECONDS = 20


@dataclass(frozen=True)
class Tool:
    """A Python program or library, pinned."""

    name: str
    packages: Sequence[str]
    task: str = ""
    """The name of a script of tests/tools/tasks; "" for `command`."""
    command: Sequence[str] = ()
    """The tool's own command. {url}, {model}, {checkpoint} and {folder} are replaced; the folder is empty."""
    environment: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 300.0

    @property
    def version(self) -> str:
        return self.packages[0].partition("==")[2] or "newest"


TOOLS = (
    Tool("openai", ["openai"], task="openai_task"),
    Tool("langchain", ["langchain-openai"], task="langchain_task"),
    Tool(
        "llama-index",
        [
            "llama-index-llms-openai-like",
            "llama-index-core",
            "llama-index-embeddings-openai-like",
            "llama-index-postprocessor-jinaai-rerank",
        ],
        task="llama_index_task",
    ),
    Tool("litellm", ["litellm"], task="litellm_task"),
    Tool("instructor", ["instructor"], task="instructor_task"),
    Tool("openai-agents", ["openai-agents"], task="agents_task", environment={"OPENAI_AGENTS_DISABLE_TRACING": "1"}),
    Tool(
        "guidellm",
        ["guidellm"],
        command=(
            *("guidellm", "run", "--backend", "kind=openai_http,target={url},model={model}"),
            *("--tokenizer", "kind=huggingface_auto,model={checkpoint}", "--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_duration,seconds={_SECONDS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
            *("--output", "kind=json,path={folder}/guidellm.json", "--disable-console-interactive"),
        ),
    ),
    Tool(
        "aiperf",
        ["aiperf"],
        command=(
            *("aiperf", "profile", "--model", "{model}", "--url", "{url}", "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", "{checkpoint}", "--concurrency", "4", "--benchmark-duration", f"{_SECONDS}"),
            *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32", "--ui", "none"),
            *("--artifact-dir", "{folder}"),
        ),
        environment={"HF_HUB_OFFLINE": "0"},  # offline it looks for the folder in the hub's cache
    ),
    Tool("lm-eval", ["lm-eval[api]", "transformers"], task="lm_eval_task"),
)
