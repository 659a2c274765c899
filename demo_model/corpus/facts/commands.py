"""Facts: the commands and the settings."""

from demo_model.corpus.facts.fact import concept

COMMANDS = (
    concept(
        "tandem up starts everything on this machine: control plane, KV service, one prefill and one decode worker. "
        "It listens on 127.0.0.1:8642.",
        "tandem up", "the tandem up command", "the command tandem up", "`tandem up`",
    ),
    concept(
        "tandem run sends one prompt to a model and prints the answer: tandem run \"Hello\".",
        "tandem run", "the tandem run command", "the command tandem run", "`tandem run`",
    ),
    concept(
        "tandem status shows the workers, their load and their free KV blocks.",
        "tandem status", "the tandem status command", "the command tandem status", "`tandem status`",
    ),
    concept(
        "tandem chat opens a conversation with a model in your terminal.",
        "tandem chat", "the tandem chat command", "the command tandem chat", "`tandem chat`",
    ),
    concept(
        "The tandem command has four main parts: tandem up, tandem run, tandem status and tandem chat.",
        "the tandem command", "the command line of Tandem", "the tandem CLI", "the command line client",
        "the commands of Tandem",
    ),
    concept(
        "@tandem/demo is the small model built into Tandem. That is me: a few million parameters, trained on a CPU.",
        "@tandem/demo", "the demo model", "the built-in model", "tandem/demo",
    ),
    concept(
        "tandem.toml is the settings file. A flag wins over an environment variable, and that wins over the file.",
        "tandem.toml", "the settings file", "the tandem.toml file", "the configuration file",
    ),
    concept(
        "TANDEM_STATE_DIR is the folder where Tandem keeps its state: its secret, logs, digests and caches.",
        "TANDEM_STATE_DIR", "the state directory", "the state folder",
        "the TANDEM_STATE_DIR variable", "$TANDEM_STATE_DIR",
    ),
    concept(
        "Port 8642 is where Tandem listens for HTTP. The control plane's gRPC port is 8643.",
        "port 8642", "the default port", "Tandem's port", "the HTTP port",
    ),
    concept(
        "--max-model-len is a flag of the workers. It limits how many tokens prompt and answer may have together.",
        "--max-model-len", "the --max-model-len flag", "max-model-len",
        "the flag --max-model-len", "the longest context of a worker",
    ),
    concept(
        "--insecure allows Tandem to listen beyond this machine without TLS. Use it only on a network you trust.",
        "--insecure", "the --insecure flag", "the insecure flag", "the flag --insecure",
    ),
    concept(
        "--served-model-name gives the model another name in the API.",
        "--served-model-name", "the --served-model-name flag", "a served model name", "the flag --served-model-name",
    ),
    concept(
        "--prefill says how many prefill workers to start. With --prefill 0 decode workers read the prompts too.",
        "--prefill", "the --prefill flag", "--prefill 0", "aggregated mode", "the flag --prefill", "the prefill flag",
    ),
    concept(
        "max_tokens limits how many tokens the answer may have.",
        "max_tokens", "the max_tokens parameter", "the max_tokens field",
        "the limit max_tokens", "max_completion_tokens",
    ),
    concept(
        "Retry-After is a header that says how many seconds to wait before you try again.",
        "Retry-After", "the Retry-After header", "a Retry-After header", "the Retry-After value",
    ),
)  # fmt: skip
