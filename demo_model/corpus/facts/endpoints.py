"""Facts: the addresses that Tandem answers at, and what a request and its answer carry."""

from demo_model.corpus.facts.fact import concept

ENDPOINTS = (
    concept(
        "/v1/chat/completions takes a list of messages and answers like the OpenAI API, streamed or whole.",
        "/v1/chat/completions", "the chat completions endpoint", "POST /v1/chat/completions", "chat completions",
        "the chat endpoint",
    ),
    concept(
        "/v1/completions takes a plain prompt, without a chat template, and goes on with it.",
        "/v1/completions", "the completions endpoint", "POST /v1/completions", "the plain completions API",
    ),
    concept(
        "/v1/models lists the models that are served here.",
        "/v1/models", "the models endpoint", "GET /v1/models", "the list of models", "the endpoint /v1/models",
    ),
    concept(
        "/client/v4/accounts/default/ai/run/@tandem/demo runs a model in the format of Workers AI. Send a prompt or "
        "messages by POST.",
        "/ai/run", "the ai/run endpoint", "the Workers AI endpoint", "/client/v4/accounts/default/ai/run",
        "the REST endpoint of Workers AI",
    ),
    concept(
        "/v1/workers shows the fleet as JSON: each worker with its memory, its KV blocks and its load.",
        "/v1/workers", "the workers endpoint", "GET /v1/workers", "the endpoint /v1/workers",
    ),
    concept(
        "/healthz says that the process lives. It does not say that a model is ready; /readyz does.",
        "/healthz", "the health endpoint", "the healthz endpoint", "GET /healthz", "the health check",
    ),
    concept(
        "/readyz answers 200 only after a request has really gone the whole way lately, and 503 before that.",
        "/readyz", "the readiness endpoint", "the readyz endpoint", "GET /readyz", "the readiness check",
    ),
    concept(
        "The base URL is http://127.0.0.1:8642. For OpenAI clients it is http://127.0.0.1:8642/v1.",
        "the base URL", "base_url", "the address of Tandem", "the API address", "the API base",
    ),
    concept(
        "Tandem has two APIs over HTTP: the one of OpenAI under /v1, and the one of Workers AI under /client/v4.",
        "the API", "Tandem's API", "the HTTP API", "the APIs of Tandem",
    ),
    concept(
        "data: [DONE] is the last event of a stream. Without it, the answer is not complete.",
        "[DONE]", "data: [DONE]", "the [DONE] event", "the end of a stream", "the last event of a stream",
    ),
    concept(
        "stream says how the answer comes: with true token by token as server-sent events, with false all at once.",
        "the stream parameter", "the stream field", "\"stream\": true", "stream: true", "the stream option",
    ),
    concept(
        "Messages are the turns of a chat. Each has a role, system, user or assistant, and a content.",
        "messages", "the messages field", "the list of messages", "the messages parameter",
    ),
    concept(
        "A system message comes first and says how the model should answer.",
        "a system message", "a system prompt", "the system message", "the system prompt",
    ),
    concept(
        "A stop string ends the answer as soon as the model has written it. Give it in the field stop.",
        "a stop string", "stop strings", "the stop parameter", "the stop field", "a stop sequence",
    ),
    concept(
        "Logprobs are the logarithms of the chances that the model gave to its tokens. Ask for them with "
        "\"logprobs\": true.",
        "logprobs", "the logprobs field", "log probabilities", "the logprobs parameter",
    ),
    concept(
        "finish_reason length means that the answer reached max_tokens or the end of the context.",
        "finish_reason length", "the finish reason length", "\"finish_reason\": \"length\"", "a length finish",
    ),
    concept(
        "finish_reason stop means that the model ended its answer by itself or wrote a stop string.",
        "finish_reason stop", "the finish reason stop", "\"finish_reason\": \"stop\"", "a stop finish",
    ),
    concept(
        "rejectIfBusy makes a request fail with 429 at once when every worker is busy, instead of waiting.",
        "rejectIfBusy", "the rejectIfBusy option", "the option rejectIfBusy", "reject if busy",
    ),
)  # fmt: skip
