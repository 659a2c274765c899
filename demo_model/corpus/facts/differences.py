"""Facts: two things that are easily mixed up."""

from demo_model.corpus.facts.fact import difference

DIFFERENCES = (
    difference(
        "Prefill reads the whole prompt at once and is bound by compute. Decode writes one token at a time and is "
        "bound by memory.",
        "prefill and decode", "decode and prefill", "the prefill phase and the decode phase",
        "prefilling and decoding", "a prefill worker and a decode worker",
    ),
    difference(
        "TTFT is the wait for the first token. ITL is the gap between the tokens after it.",
        "TTFT and ITL", "ITL and TTFT", "time to first token and inter-token latency", "the TTFT and the ITL",
    ),
    difference(
        "A freed block is unused but may still be hit. An evicted block is forgotten.",
        "free and evict", "evict and free", "a freed block and an evicted block",
        "freeing and evicting", "free blocks and evicted blocks",
    ),
    difference(
        "An abort is our decision. A cancel means that the caller left.",
        "abort and cancel", "cancel and abort", "an aborted request and a cancelled request",
        "an abort and a cancel", "aborting and cancelling",
    ),
    difference(
        "Throughput counts everything that is finished. Goodput counts only what is finished within its latency "
        "targets.",
        "throughput and goodput", "goodput and throughput",
        "the throughput and the goodput", "good throughput and throughput",
    ),
    difference(
        "A slot is one position. A block is a fixed number of positions.",
        "a slot and a block", "a block and a slot", "slots and blocks", "a KV slot and a KV block",
    ),
    difference(
        "tandem run answers one prompt and ends. tandem chat keeps a conversation going.",
        "tandem run and tandem chat", "tandem chat and tandem run",
        "the commands tandem run and tandem chat", "running a prompt and chatting",
    ),
    difference(
        "tandem up starts the services. tandem status shows how they are.",
        "tandem up and tandem status", "tandem status and tandem up",
        "the commands tandem up and tandem status", "`tandem up` and `tandem status`",
    ),
    difference(
        "Latency is how long one request takes. Throughput is how much the system finishes in a second.",
        "latency and throughput", "throughput and latency",
        "the latency and the throughput", "low latency and high throughput",
    ),
    difference(
        "Computed tokens have their KV already. Scheduled tokens run in this step.",
        "computed tokens and scheduled tokens", "scheduled tokens and computed tokens",
        "computed and scheduled tokens", "scheduled and computed tokens",
    ),
    difference(
        "Temperature 0 always takes the most likely token. A higher temperature lets less likely tokens win at times.",
        "a low and a high temperature", "temperature 0 and temperature 1", "greedy decoding and sampling",
        "a high and a low temperature",
    ),
    difference(
        "A KV cache serves one request while it runs. A prefix cache lets later requests use the same blocks.",
        "a KV cache and a prefix cache", "a prefix cache and a KV cache", "KV caching and prefix caching",
        "the KV cache and the prefix cache",
    ),
    difference(
        "ITL is the gap between two tokens of one request. TPOT is the average time per token after the first.",
        "ITL and TPOT", "TPOT and ITL", "the ITL and the TPOT", "inter-token latency and time per output token",
    ),
    difference(
        "To free a block means that nobody uses it. To release means to give back a lease.",
        "free and release", "release and free", "freeing a block and releasing a lease", "freeing and releasing",
    ),
    difference(
        "/healthz says that the process lives. /readyz says that requests really go the whole way.",
        "/healthz and /readyz", "/readyz and /healthz", "health and readiness", "the health and the readiness endpoint",
    ),
    difference(
        "Draining lets a worker finish its requests. Migrating moves a request to another worker.",
        "drain and migrate", "migrate and drain", "draining and migrating", "migration and draining",
    ),
    difference(
        "/v1/chat/completions takes messages and uses the chat template. /v1/completions takes a plain prompt.",
        "chat completions and completions", "/v1/chat/completions and /v1/completions", "a prompt and messages",
        "messages and a prompt",
    ),
    difference(
        "make run starts Tandem and installs it first if needed. tandem up only starts it.",
        "make run and tandem up", "tandem up and make run", "`make run` and `tandem up`",
        "the commands make run and tandem up",
    ),
    difference(
        "A cancel means that the caller left. A timeout means that a deadline passed.",
        "cancel and timeout", "timeout and cancel", "a cancel and a timeout", "a cancelled and a timed out request",
    ),
)  # fmt: skip
