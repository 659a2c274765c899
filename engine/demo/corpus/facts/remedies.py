"""Facts: what goes wrong, and what helps."""

from engine.demo.corpus.facts.fact import symptom

REMEDIES = (
    symptom(
        "A 429 means that the queue is full. Wait as long as Retry-After says and send the request again.",
        "I get a 429", "the gateway answers 429", "requests fail with status 429", "it says too many requests",
    ),
    symptom(
        "Your prompt is longer than the model can take. Shorten it or raise --max-model-len.",
        "my prompt is too long", "it says the prompt has too many tokens", "the context length is exceeded",
    ),
    symptom(
        "The port is taken by another process. Stop that process or choose another port with --port.",
        "the port is already in use", "it says address already in use", "port 8642 is taken",
    ),
    symptom(
        "Tandem is not running or listens somewhere else. Run tandem up and check the address with tandem status.",
        "the connection is refused", "I cannot connect", "curl says connection refused",
    ),
    symptom(
        "That model is not served here. Check the name with tandem status, or start it with tandem up --model.",
        "the model is not found", "I get a 404 for the model", "it says model not found",
    ),
    symptom(
        "The answer reached max_tokens. Raise max_tokens if you want more.",
        "the answer is cut off", "the answer stops in the middle", "finish_reason is length",
    ),
    symptom(
        "The KV cache is full, so requests wait or are preempted. Add a decode worker or lower the number of requests.",
        "the KV cache is full", "there are no free KV blocks", "requests are preempted all the time",
    ),
    symptom(
        "A long prompt queues for prefill. Add a prefill worker, or let prompts share a prefix.",
        "TTFT is too high", "the first token takes too long", "the first token is slow",
    ),
    symptom(
        "The decode batch is too large for the machine. Add a decode worker.",
        "ITL is too high", "tokens come slowly", "the stream is slow after the first token",
    ),
    symptom(
        "The worker died. Its requests go on on another worker with the very next token, and you only see a pause.",
        "a decode worker crashed", "a worker died", "a worker is gone",
    ),
    symptom(
        "Your key is missing or wrong. Send it as Authorization: Bearer followed by your token.",
        "I get a 401", "it says unauthorized", "my API key is refused",
    ),
    symptom(
        "The request body is not valid. The error names the field, the value and the limit.",
        "I get a 400", "it says bad request", "my request is rejected as invalid",
    ),
    symptom(
        "No worker is ready yet. Wait until tandem status shows one, and look at the log of the worker.",
        "I get a 503", "it says no worker is ready", "the service is unavailable",
    ),
    symptom(
        "The machine has too little memory for the model or its KV cache. Use a smaller model or a smaller KV pool.",
        "the worker runs out of memory", "I get an out of memory error", "the engine is killed for memory",
    ),
    symptom(
        "This model has no chat template. Send a prompt instead of messages, or give a template.",
        "it says there is no chat template", "messages are refused without a template",
    ),
    symptom(
        "The stream broke before its end, so the answer is not complete. Send the request again.",
        "the stream ends without [DONE]", "the stream breaks off", "there is an error event in the stream",
    ),
    symptom(
        "The two workers serve different weights or another layout. Start both with the same model and settings.",
        "it says the fingerprint does not match", "the KV layout does not match", "I see a fingerprint mismatch",
    ),
    symptom(
        "Prompts are cached block by block from the first token on. One changed token early makes the rest new.",
        "cached_tokens is zero", "the prefix cache never hits", "there are no cache hits",
    ),
    symptom(
        "Listening beyond this machine needs TLS. Give a certificate, or say --insecure on a network you trust.",
        "it refuses to listen on 0.0.0.0", "it says TLS is required", "it wants --insecure",
    ),
)  # fmt: skip
