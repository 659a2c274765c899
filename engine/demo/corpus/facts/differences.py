"""Facts: two things that are easily mixed up."""

from engine.demo.corpus.facts.fact import difference

DIFFERENCES = (
    difference(
        "Prefill reads the whole prompt at once and is bound by compute. Decode writes one token at a time and is "
        "bound by memory.",
        "prefill and decode", "decode and prefill", "the prefill phase and the decode phase",
    ),
    difference(
        "TTFT is the wait for the first token. ITL is the gap between the tokens after it.",
        "TTFT and ITL", "ITL and TTFT", "time to first token and inter-token latency",
    ),
    difference(
        "A freed block is unused but may still be hit. An evicted block is forgotten.",
        "free and evict", "evict and free", "a freed block and an evicted block",
    ),
    difference(
        "An abort is our decision. A cancel means that the caller left.",
        "abort and cancel", "cancel and abort", "an aborted request and a cancelled request",
    ),
    difference(
        "Throughput counts everything that is finished. Goodput counts only what is finished within its latency "
        "targets.",
        "throughput and goodput", "goodput and throughput",
    ),
    difference(
        "A slot is one position. A block is a fixed number of positions.",
        "a slot and a block", "a block and a slot", "slots and blocks",
    ),
    difference(
        "tandem run answers one prompt and ends. tandem chat keeps a conversation going.",
        "tandem run and tandem chat", "tandem chat and tandem run",
    ),
    difference(
        "tandem up starts the services. tandem status shows how they are.",
        "tandem up and tandem status", "tandem status and tandem up",
    ),
    difference(
        "Latency is how long one request takes. Throughput is how much the system finishes in a second.",
        "latency and throughput", "throughput and latency",
    ),
    difference(
        "Computed tokens have their KV already. Scheduled tokens run in this step.",
        "computed tokens and scheduled tokens", "scheduled tokens and computed tokens",
    ),
    difference(
        "Temperature 0 always takes the most likely token. A higher temperature lets less likely tokens win at times.",
        "a low and a high temperature", "temperature 0 and temperature 1", "greedy decoding and sampling",
    ),
    difference(
        "A KV cache serves one request while it runs. A prefix cache lets later requests use the same blocks.",
        "a KV cache and a prefix cache", "a prefix cache and a KV cache", "KV caching and prefix caching",
    ),
)  # fmt: skip
