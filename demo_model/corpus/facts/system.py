"""Facts: the parts of Tandem, and what one knows about language models beside the glossary."""

from demo_model.corpus.facts.fact import concept

SYSTEM = (
    concept(
        "Tandem serves large language models with prefill and decode on separate machines. It moves the KV cache "
        "between them and offers the whole as one API.",
        "Tandem", "this project", "Tandem Serve", "the Tandem server",
    ),
    concept(
        "Disaggregated serving runs prefill and decode in separate services. A long prompt then never stalls the "
        "answers of others.",
        "disaggregated serving", "disaggregation", "prefill and decode disaggregation", "splitting prefill from decode",
    ),
    concept(
        "The control plane is the front of Tandem. It tokenizes, picks the workers for each request and streams the "
        "answer back.",
        "the control plane", "a control plane", "Tandem's control plane", "the gateway", "control_plane",
    ),
    concept(
        "The KV transfer service holds, leases, finds and moves KV blocks between workers.",
        "the KV transfer service", "the KV service", "KV transfer", "kv_transfer_svc",
    ),
    concept(
        "The router picks a decode worker first. Then it decides whether the rest of the prompt is worth a prefill "
        "worker, and which.",
        "the router", "Tandem's router", "request routing", "routing of requests",
    ),
    concept(
        "The scheduler decides which tokens of which requests run in the next step.",
        "the scheduler", "the engine's scheduler", "scheduling in the engine",
        "a scheduler", "the scheduler of the engine",
    ),
    concept(
        "A token is a piece of text: a word, a part of a word or a sign. Models read and write tokens.",
        "a token", "tokens", "a text token", "token",
    ),
    concept(
        "A tokenizer cuts text into tokens and turns tokens back into text.",
        "a tokenizer", "the tokenizer", "tokenization", "tokenizing",
    ),
    concept(
        "A chat template turns a list of messages into the one text that the model was trained on.",
        "a chat template", "the chat template", "chat templates", "chat template",
    ),
    concept(
        "A large language model is a neural network that predicts the next token of a text.",
        "a large language model", "an LLM", "a language model", "LLMs",
    ),
    concept(
        "Attention lets each token look at the tokens before it and take what it needs from them.",
        "attention", "the attention mechanism", "self-attention", "an attention layer",
    ),
    concept(
        "Paged attention reads the KV cache block by block, wherever the blocks lie. So memory need not be one long "
        "piece.",
        "paged attention", "PagedAttention", "attention over pages", "paging the KV cache",
    ),
    concept(
        "Temperature says how bold the choice of the next token is. At 0 the most likely token always wins.",
        "temperature", "the temperature", "sampling temperature", "the temperature parameter",
    ),
    concept(
        "Top-p keeps the most likely tokens whose chances add up to p, and draws only among them.",
        "top-p", "top_p", "nucleus sampling", "top-p sampling", "the top_p parameter",
    ),
    concept(
        "A seed fixes the random choices. The same request with the same seed gives the same tokens.",
        "a seed", "the seed", "the seed parameter", "a sampling seed",
    ),
    concept(
        "The context length is the largest number of tokens that prompt and answer may have together.",
        "the context length", "the context window", "a context window", "the maximum context length",
    ),
    concept(
        "Speculative decoding lets a cheap draft propose several tokens and the model check them in one step.",
        "speculative decoding", "speculation", "a draft model", "speculative sampling", "drafting tokens",
    ),
    concept(
        "Quantization stores weights in fewer bits. The model gets smaller and faster and a little less exact.",
        "quantization", "a quantized model", "weight quantization", "int8 weights",
    ),
    concept(
        "Tensor parallelism cuts every layer into parts, so that several GPUs compute one model together.",
        "tensor parallelism", "tensor-parallel serving", "TP", "tensor parallel", "tensor parallelism on several GPUs",
    ),
    concept(
        "A finish reason says why an answer ended: stop, length, tool_calls or an error.",
        "a finish reason", "the finish reason", "finish_reason", "finish reasons",
    ),
    concept(
        "A model fingerprint covers the weights, the tokenizer and the numerics. Workers share KV only when it is "
        "the same.",
        "a model fingerprint", "the model fingerprint", "the fingerprint of a model",
        "a fingerprint", "model fingerprints",
    ),
    concept(
        "A serverless binding lets code call a model as if it were a local object: env.AI.run(model, inputs).",
        "a serverless binding", "the AI binding", "env.AI", "env.AI.run",
    ),
    concept(
        "Server-sent events are a stream of small text messages over one HTTP answer. Tandem sends tokens this way.",
        "server-sent events", "SSE", "an SSE stream", "a stream of server-sent events", "an event stream",
    ),
    concept(
        "Autoscaling adds or removes workers as the load changes, for prefill and decode separately.",
        "autoscaling", "the autoscaler", "automatic scaling", "scaling up and down",
    ),
    concept(
        "A heartbeat is a short report that each worker sends every second. A worker silent for five seconds is gone.",
        "a heartbeat", "heartbeats", "the worker heartbeat", "heartbeats of workers",
    ),
    concept(
        "gRPC is how Tandem's services call one another: typed messages over HTTP/2.",
        "gRPC", "the gRPC interface", "gRPC in Tandem", "gRPC between the services",
    ),
    concept(
        "A trace shows where the time of one request went: queue, tokenize, route, prefill, KV transfer and decode.",
        "a trace", "a request trace", "tracing in Tandem", "traces", "tracing",
    ),
)  # fmt: skip
