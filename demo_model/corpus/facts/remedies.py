"""Facts: what goes wrong, and what helps."""

from demo_model.corpus.facts.fact import symptom

REMEDIES = (
    symptom(
        "Your prompt is longer than the model can take. Shorten it; the error says by how many tokens.",
        "my prompt is too long", "it says the prompt has too many tokens", "the context length is exceeded",
        "it says context_length_exceeded", "my prompt does not fit the model",
    ),
    symptom(
        "The port is taken by another process. Stop that process or choose another port with --port and --grpc-port.",
        "the port is already in use", "it says address already in use", "port 8642 is taken",
        "it says that the port is in use", "another process has the port",
    ),
    symptom(
        "Tandem is not running or listens somewhere else. Run tandem up, or say where it is with --url or "
        "TANDEM_BASE_URL.",
        "the connection is refused", "I cannot connect", "curl says connection refused",
        "it says no Tandem at this address", "the client cannot reach Tandem",
    ),
    symptom(
        "The answer reached max_tokens. Raise max_tokens if you want more.",
        "the answer is cut off", "the answer stops in the middle", "finish_reason is length",
        "the answer is too short", "the last sentence is not finished",
    ),
    symptom(
        "The KV cache is full, so requests wait or are preempted. Add a decode worker or lower the number of requests.",
        "the KV cache is full", "there are no free KV blocks", "requests are preempted all the time",
        "the KV memory is used up", "requests are preempted",
    ),
    symptom(
        "A long prompt queues for prefill. Add a prefill worker, or let prompts share a prefix.",
        "TTFT is too high", "the first token takes too long", "the first token is slow",
        "I wait long for the first token", "the answer starts late",
    ),
    symptom(
        "The decode batch is too large for the machine. Add a decode worker.",
        "ITL is too high", "tokens come slowly", "the stream is slow after the first token",
        "the gap between tokens is too long", "the answer is written slowly",
    ),
    symptom(
        "The worker died. Its requests go on on another worker with the very next token, and you only see a pause.",
        "a decode worker crashed", "a worker died", "a worker is gone", "a worker crashed", "a worker was killed",
    ),
    symptom(
        "The machine has too little memory for the model or its KV cache. Use a smaller model or a smaller KV pool.",
        "the worker runs out of memory", "I get an out of memory error", "the engine is killed for memory",
        "the memory is not enough", "a worker is out of memory",
    ),
    symptom(
        "This model has no chat template. Send a prompt instead of messages.",
        "it says there is no chat template", "messages are refused without a template",
        "the model has no chat template", "it says to send a prompt instead",
    ),
    symptom(
        "The stream broke before its end, so the answer is not complete. Send the request again.",
        "the stream ends without [DONE]", "the stream breaks off", "there is an error event in the stream",
        "my stream breaks", "[DONE] never comes",
    ),
    symptom(
        "The two workers serve different weights or another layout. Start both with the same model and settings.",
        "it says the fingerprint does not match", "the KV layout does not match", "I see a fingerprint mismatch",
        "the fingerprints differ", "the workers have different weights",
    ),
    symptom(
        "Prompts are cached block by block from the first token on. One changed token early makes the rest new.",
        "cached_tokens is zero", "the prefix cache never hits", "there are no cache hits",
        "cached_tokens is always 0", "nothing comes from the prefix cache",
    ),
    symptom(
        "Listening beyond this machine lets others call it without TLS. Add --insecure if you trust the network.",
        "it refuses to listen on 0.0.0.0", "it says TLS is required", "it wants --insecure",
        "tandem up refuses my --host", "it says other machines could call this one",
    ),
)  # fmt: skip
