"""Facts: what is measured when language models are served."""

from demo_model.corpus.facts.fact import concept

MEASURES = (
    concept(
        "TTFT is the time to first token: from the gateway receiving a request to its first token leaving.",
        "TTFT", "time to first token", "the TTFT", "the time to first token",
    ),
    concept(
        "ITL is the inter-token latency: the gap between two tokens of one request.",
        "ITL", "inter-token latency", "the ITL", "the inter-token latency",
    ),
    concept(
        "TPOT is the time per output token: the total time less TTFT, divided by the output tokens less one.",
        "TPOT", "time per output token", "the TPOT", "the time per output token",
    ),
    concept(
        "The hand-over gap is the time between token one and token two, while the KV cache moves to decode.",
        "the hand-over gap", "hand-over gap", "the handover gap",
        "hand-over", "the gap between token one and token two",
    ),
    concept(
        "Goodput is the number of requests per second that are answered within their latency targets.",
        "goodput", "the goodput", "good throughput", "goodput in serving",
    ),
    concept(
        "Throughput is how many tokens or requests a system finishes in a second.",
        "throughput", "the throughput", "token throughput", "the throughput of a system",
    ),
    concept(
        "Latency is the time that one request waits for its answer.",
        "latency", "the latency", "request latency", "the latency of a request",
    ),
    concept(
        "p99 is the value that 99 of 100 requests stay below. It shows the slow tail that an average hides.",
        "p99", "the p99", "the 99th percentile", "tail latency",
    ),
    concept(
        "Usage counts the tokens of a request: prompt tokens, cached tokens and completion tokens.",
        "usage", "the usage field", "token usage", "usage in the reply",
    ),
)  # fmt: skip
