"""Facts: the words of serving language models, as the project's glossary uses them."""

from engine.demo.corpus.facts.fact import concept

CONCEPTS = (
    concept(
        "A KV cache holds the keys and values of tokens that are already computed. With it, each new token costs one "
        "small step instead of a pass over the whole text.",
        "a KV cache", "the KV cache", "KV cache", "the key-value cache", "KV caching",
    ),
    concept(
        "Prefill reads the whole prompt in one compute-bound pass. It leaves a KV cache and the first token.",
        "prefill", "the prefill phase", "prefilling", "the prefill half",
    ),
    concept(
        "Decode writes the answer one token at a time. It is bound by memory: every step reads all the weights.",
        "decode", "the decode phase", "decoding", "the decode half",
    ),
    concept(
        "Chunked prefill cuts a long prompt into pieces and computes them one step after another. Other requests get "
        "their turn between the pieces.",
        "chunked prefill", "prefill in chunks", "prefill chunking",
    ),
    concept(
        "Continuous batching lets requests join and leave the running batch at every step. Nobody waits for the "
        "slowest request to finish.",
        "continuous batching", "in-flight batching", "dynamic batching of requests",
    ),
    concept(
        "A batch is the set of requests that run together in one step.",
        "a batch", "the running batch", "a batch of requests",
    ),
    concept(
        "A step is one forward pass of the model together with its scheduling: schedule, execute, update.",
        "a step", "one engine step", "an engine step", "a step of the engine",
    ),
    concept(
        "A request is one call by a client. It becomes one generated run of tokens.",
        "a request", "one request", "a client request",
    ),
    concept(
        "A block is a fixed number of token positions across all layers. It is the unit in which KV memory is given "
        "out.",
        "a block", "a KV block", "a cache block", "a block of KV memory",
    ),
    concept(
        "A slot is one position in a KV block: room for the keys and values of one token.",
        "a slot", "a KV slot", "a cache slot",
    ),
    concept(
        "A block table lists the block ids of one request in order. With it the engine finds the KV cache of every "
        "token.",
        "a block table", "the block table", "block tables",
    ),
    concept(
        "The slot mapping says, for each token of this step, into which slot its keys and values are written.",
        "the slot mapping", "a slot mapping", "slot mappings",
    ),
    concept(
        "A prefix cache keeps full blocks and finds them by their hash. A prompt that begins like an earlier one "
        "skips the shared part.",
        "a prefix cache", "the prefix cache", "prefix caching", "prompt caching",
    ),
    concept(
        "A block hash names a full block by all the tokens up to its end. Two prompts with the same beginning have "
        "the same block hashes.",
        "a block hash", "the block hash", "block hashes", "block hashing",
    ),
    concept(
        "Computed tokens are tokens whose keys and values already exist in the KV cache.",
        "computed tokens", "a computed token", "num_computed_tokens",
    ),
    concept(
        "Scheduled tokens are the tokens that run in this step.",
        "scheduled tokens", "a scheduled token", "num_scheduled_tokens",
    ),
    concept(
        "Cached tokens are tokens of your prompt that were computed before your request came. They cost almost "
        "nothing.",
        "cached tokens", "a cached token", "cached_tokens", "the cached tokens in usage",
    ),
    concept(
        "To free a block means that nobody uses it any more. Its content stays and may still be hit.",
        "freeing a block", "a free block", "a freed block",
    ),
    concept(
        "To evict a block means that its content is forgotten, so that the memory can be used for something else.",
        "eviction", "evicting a block", "an evicted block", "KV eviction",
    ),
    concept(
        "To release means to give back a lease, so that the blocks behind it can go.",
        "releasing a lease", "a release", "a released lease",
    ),
    concept(
        "Preemption takes the blocks of a running request away and puts the request back in the queue. It goes on "
        "later with the very next token.",
        "preemption", "preempting a request", "a preempted request",
    ),
    concept(
        "A KV handle says what to ask the KV service for. The control plane makes it, and it names the request, the "
        "attempt and the worker.",
        "a KV handle", "the KV handle", "KV handles",
    ),
    concept(
        "A lease says until when a block is kept. It lasts seconds and is renewed by heartbeats, so nothing is kept "
        "for a dead process.",
        "a lease", "a KV lease", "leasing blocks", "the lease on a block",
    ),
    concept(
        "A KV layout is the shape, the type and the order of the bytes in a KV cache. Both sides compare it before a "
        "byte moves.",
        "a KV layout", "the KV layout", "the layout of the KV cache", "KvLayout",
    ),
    concept(
        "To seal a block means to make it visible for good. A sealed block is never written again.",
        "sealing", "sealing a block", "a sealed block",
    ),
    concept(
        "A slab is a run of blocks across a run of layers. It is the unit in which prefill seals and decode pulls.",
        "a slab", "a KV slab", "slabs",
    ),
    concept(
        "A worker is a process that runs one half of the work: prefill or decode.",
        "a worker", "a Tandem worker", "a worker process",
    ),
    concept(
        "A route is the pair of workers chosen for a request: one for prefill and one for decode.",
        "a route", "the route of a request", "a routing decision",
    ),
    concept(
        "An incarnation is one life of a process. A message from an earlier incarnation is refused.",
        "an incarnation", "an incarnation id", "the incarnation of a worker",
    ),
    concept(
        "To drain means to finish what runs and to accept nothing new. A worker drains before it stops.",
        "draining", "draining a worker", "a draining worker",
    ),
    concept(
        "To migrate a request means to go on with it on another worker. The stream goes on with the very next token.",
        "migration", "migrating a request", "request migration",
    ),
    concept(
        "To abort a request means that we stop it ourselves.",
        "an abort", "aborting a request", "an aborted request",
    ),
    concept(
        "To cancel a request means that the caller left. Its blocks are given back within one step.",
        "cancellation", "cancelling a request", "a cancelled request",
    ),
    concept(
        "A timeout means that a deadline passed before the answer was ready.",
        "a timeout", "a request timeout", "a deadline that passed",
    ),
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
        "the control plane", "a control plane", "Tandem's control plane",
    ),
    concept(
        "The KV transfer service holds, leases, finds and moves KV blocks between workers.",
        "the KV transfer service", "the KV service", "KV transfer", "kv_transfer_svc",
    ),
    concept(
        "The router picks a decode worker first. Then it decides whether the rest of the prompt is worth a prefill "
        "worker, and which.",
        "the router", "Tandem's router", "request routing",
    ),
    concept(
        "The scheduler decides which tokens of which requests run in the next step.",
        "the scheduler", "the engine's scheduler", "scheduling in the engine",
    ),
    concept(
        "A token is a piece of text: a word, a part of a word or a sign. Models read and write tokens.",
        "a token", "tokens", "a text token",
    ),
    concept(
        "A tokenizer cuts text into tokens and turns tokens back into text.",
        "a tokenizer", "the tokenizer", "tokenization", "tokenizing",
    ),
    concept(
        "A chat template turns a list of messages into the one text that the model was trained on.",
        "a chat template", "the chat template", "chat templates",
    ),
    concept(
        "A large language model is a neural network that predicts the next token of a text.",
        "a large language model", "an LLM", "a language model", "LLMs",
    ),
    concept(
        "Attention lets each token look at the tokens before it and take what it needs from them.",
        "attention", "the attention mechanism", "self-attention",
    ),
    concept(
        "Paged attention reads the KV cache block by block, wherever the blocks lie. So memory need not be one long "
        "piece.",
        "paged attention", "PagedAttention", "attention over pages",
    ),
    concept(
        "Temperature says how bold the choice of the next token is. At 0 the most likely token always wins.",
        "temperature", "the temperature", "sampling temperature", "the temperature parameter",
    ),
    concept(
        "Top-p keeps the most likely tokens whose chances add up to p, and draws only among them.",
        "top-p", "top_p", "nucleus sampling",
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
        "speculative decoding", "speculation", "a draft model",
    ),
    concept(
        "Quantization stores weights in fewer bits. The model gets smaller and faster and a little less exact.",
        "quantization", "a quantized model", "weight quantization", "int8 weights",
    ),
    concept(
        "Tensor parallelism cuts every layer into parts, so that several GPUs compute one model together.",
        "tensor parallelism", "tensor-parallel serving", "TP",
    ),
    concept(
        "A finish reason says why an answer ended: stop, length, tool_calls or an error.",
        "a finish reason", "the finish reason", "finish_reason",
    ),
    concept(
        "A model fingerprint covers the weights, the tokenizer and the numerics. Workers share KV only when it is "
        "the same.",
        "a model fingerprint", "the model fingerprint", "the fingerprint of a model",
    ),
    concept(
        "A serverless binding lets code call a model as if it were a local object: env.AI.run(model, inputs).",
        "a serverless binding", "the AI binding", "env.AI", "env.AI.run",
    ),
    concept(
        "Server-sent events are a stream of small text messages over one HTTP answer. Tandem sends tokens this way.",
        "server-sent events", "SSE", "an SSE stream",
    ),
    concept(
        "Autoscaling adds or removes workers as the load changes, for prefill and decode separately.",
        "autoscaling", "the autoscaler", "automatic scaling",
    ),
    concept(
        "A heartbeat is a short report that each worker sends every second. A worker silent for five seconds is gone.",
        "a heartbeat", "heartbeats", "the worker heartbeat",
    ),
    concept(
        "gRPC is how Tandem's services call one another: typed messages over HTTP/2.",
        "gRPC", "the gRPC interface", "gRPC in Tandem",
    ),
    concept(
        "A trace shows where the time of one request went: queue, tokenize, route, prefill, KV transfer and decode.",
        "a trace", "a request trace", "tracing in Tandem",
    ),
)  # fmt: skip
