"""The tools: what is installed, and what each is asked to do.

A task is a script of tests/tools/tasks, or the tool's own command. Both find the address, the models and the folder of
the checkpoint in the environment: TANDEM_URL, TANDEM_MODEL, TANDEM_CHECKPOINT, TANDEM_EMBEDDER, TANDEM_RERANKER.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SECONDS = 20
_TORCH = "torch==2.13.0"
"""A tool that needs torch takes the one that the tests have; its newest brings gigabytes of CUDA."""


@dataclass(frozen=True)
class Tool:
    """A program or a library of Python or of Node.js, pinned."""

    name: str
    packages: Sequence[str]
    """As pip names them, or npm if the task's name ends with ".mjs". The first one is the tool."""
    task: str = ""
    """The name of a script of tests/tools/tasks; "" for `command`."""
    command: Sequence[str] = ()
    """The tool's own command. {url}, {model}, {alias} (without @), {checkpoint} and {folder} are replaced.

    The folder is empty.
    """
    environment: Mapping[str, str] = field(default_factory=dict)
    is_small: bool = True
    """`make services` installs the tool, and `make test` lets it do its task; others only in `make tools`."""
    seconds: float = 300.0

    @property
    def is_node(self) -> bool:
        return self.task.endswith(".mjs")


TOOLS = (
    Tool("openai", ["openai==3.54.0"], task="openai_task.py"),
    Tool("openai-node", ["openai@6.49.0"], task="openai_node_task.mjs"),
    Tool("ai-sdk", ["ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.4.3"], task="ai_sdk_task.mjs"),
    Tool("langchain", ["langchain-openai==1.7.3"], task="langchain_task.py"),
    Tool(
        "llama-index",
        [
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-core==0.14.25",
            "llama-index-embeddings-openai-like==0.4.0",
            "llama-index-postprocessor-jinaai-rerank==0.6.0",
        ],
        task="llama_index_task.py",
    ),
    Tool("litellm", ["litellm==1.106.2"], task="litellm_task.py"),
    Tool("instructor", ["instructor==1.17.0"], task="instructor_task.py"),
    Tool(
        "openai-agents",
        ["openai-agents==0.24.0"],
        task="agents_task.py",
        environment={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    ),
    Tool(
        "guidellm",
        ["guidellm==0.8.1", _TORCH],
        command=(
            *("guidellm", "run", "--backend", "kind=openai_http,target={url},model={alias}"),
            *("--tokenizer", "kind=huggingface_auto,model={checkpoint}", "--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_duration,seconds={_SECONDS}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
            *("--output", "kind=json,path={folder}/guidellm.json", "--disable-console-interactive"),
        ),
        is_small=False,
    ),
    Tool(
        "aiperf",
        ["aiperf==0.13.0"],
        command=(
            *("aiperf", "profile", "--model", "{model}", "--url", "{url}", "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", "{checkpoint}", "--concurrency", "4", "--benchmark-duration", f"{_SECONDS}"),
            *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32", "--ui", "none"),
            *("--artifact-dir", "{folder}"),
        ),
        environment={"HF_HUB_OFFLINE": ""},  # offline, aiperf looks for the folder in the hub's cache
        is_small=False,
    ),
    Tool("lm-eval", ["lm-eval[api]==0.4.13", "transformers", _TORCH], task="lm_eval_task.py", is_small=False),
    Tool("open-webui", ["open-webui==0.12.4", _TORCH], task="open_webui_task.py", is_small=False),
)
