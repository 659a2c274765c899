"""Facts: the words of serving language models, as the project's glossary uses them."""

from demo_model.corpus.facts.fact import concept

CONCEPTS = (
    concept(
        "A KV cache holds the attention keys and values of the tokens computed so far. Each new token then costs one "
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
        "chunking the prefill", "a prefill chunk", "chunked prompts",
    ),
    concept(
        "Continuous batching lets requests join and leave the running batch at every step. Nobody waits for the "
        "slowest request to finish.",
        "continuous batching", "in-flight batching", "dynamic batching of requests",
        "continuous batches", "iteration-level batching",
    ),
    concept(
        "A batch is the set of requests that run together in one step.",
        "a batch", "the running batch", "a batch of requests", "batch", "batching", "the batch of a step",
    ),
    concept(
        "A step is one forward pass of the model together with its scheduling: schedule, execute, update.",
        "a step", "one engine step", "an engine step", "a step of the engine", "step", "a forward step",
    ),
    concept(
        "A request is one call by a client. It becomes one generated run of tokens.",
        "a request", "one request", "a client request", "request", "a call by a client",
    ),
    concept(
        "A block is a fixed number of token positions across all layers. It is the unit in which KV memory is given "
        "out.",
        "a block", "a KV block", "a cache block", "a block of KV memory", "block", "KV blocks", "blocks",
    ),
    concept(
        "A slot is one position in a KV block: room for the keys and values of one token.",
        "a slot", "a KV slot", "a cache slot", "slot", "KV slots", "slots",
    ),
    concept(
        "A block table lists the block ids of one request in order. With it the engine finds the KV cache of every "
        "token.",
        "a block table", "the block table", "block tables", "block table", "the table of blocks",
    ),
    concept(
        "The slot mapping says, for each token of this step, into which slot its keys and values are written.",
        "the slot mapping", "a slot mapping", "slot mappings", "slot mapping", "slot_mapping",
    ),
    concept(
        "A prefix cache keeps full blocks and finds them by their hash. A prompt that begins like an earlier one "
        "skips the shared part.",
        "a prefix cache", "the prefix cache", "prefix caching", "prompt caching", "prefix cache",
    ),
    concept(
        "A block hash names a full block by all the tokens up to its end. Two prompts with the same beginning have "
        "the same block hashes.",
        "a block hash", "the block hash", "block hashes", "block hashing", "block hash", "the hash of a block",
    ),
    concept(
        "Computed tokens are tokens whose keys and values already exist in the KV cache.",
        "computed tokens", "a computed token", "num_computed_tokens",
        "the computed tokens", "the number of computed tokens",
    ),
    concept(
        "Scheduled tokens are the tokens that run in this step.",
        "scheduled tokens", "a scheduled token", "num_scheduled_tokens",
        "the scheduled tokens", "the number of scheduled tokens",
    ),
    concept(
        "Cached tokens are tokens of your prompt that were computed before your request came. They cost almost "
        "nothing.",
        "cached tokens", "a cached token", "cached_tokens", "the cached tokens in usage", "the number of cached tokens",
    ),
    concept(
        "To free a block means that nobody uses it any more. Its content stays and may still be hit.",
        "freeing a block", "a free block", "a freed block", "freeing", "freeing blocks", "freed blocks",
    ),
    concept(
        "To evict a block means that its content is forgotten, so that the memory can be used for something else.",
        "eviction", "evicting a block", "an evicted block", "KV eviction", "evicting", "evicting blocks",
    ),
    concept(
        "To release means to give back a lease, so that the blocks behind it can go.",
        "releasing a lease", "a release", "a released lease", "releasing", "the release of a lease",
    ),
    concept(
        "Preemption takes the blocks of a running request away and puts the request back in the queue. It goes on "
        "later with the very next token.",
        "preemption", "preempting a request", "a preempted request", "preempting", "being preempted",
    ),
    concept(
        "A KV handle says what to ask the KV service for. The control plane makes it, and it names the request, the "
        "attempt and the worker.",
        "a KV handle", "the KV handle", "KV handles", "KV handle", "a handle",
    ),
    concept(
        "A lease says until when a block is kept. It lasts seconds and is renewed by heartbeats, so nothing is kept "
        "for a dead process.",
        "a lease", "a KV lease", "leasing blocks", "the lease on a block", "lease", "leases",
    ),
    concept(
        "A KV layout is the shape, the type and the order of the bytes in a KV cache. Both sides compare it before a "
        "byte moves.",
        "a KV layout", "the KV layout", "the layout of the KV cache", "KvLayout", "KV layout", "a layout",
    ),
    concept(
        "To seal a block means to make it visible for good. A sealed block is never written again.",
        "sealing", "sealing a block", "a sealed block", "a seal", "sealed blocks", "sealing blocks",
    ),
    concept(
        "A slab is a run of blocks across a run of layers. It is the unit in which prefill seals and decode pulls.",
        "a slab", "a KV slab", "slabs", "slab", "a slab of KV",
    ),
    concept(
        "A worker is a process that runs one half of the work: prefill or decode.",
        "a worker", "a Tandem worker", "a worker process", "worker", "workers", "a prefill or decode worker",
    ),
    concept(
        "A route is the pair of workers chosen for a request: one for prefill and one for decode.",
        "a route", "the route of a request", "a routing decision", "route", "routing", "the route",
    ),
    concept(
        "An incarnation is one life of a process. A message from an earlier incarnation is refused.",
        "an incarnation", "an incarnation id", "the incarnation of a worker", "incarnation", "incarnations",
    ),
    concept(
        "To drain means to finish what runs and to accept nothing new. A worker drains before it stops.",
        "draining", "draining a worker", "a draining worker", "a drain", "drain", "draining workers",
    ),
    concept(
        "To migrate a request means to go on with it on another worker. The stream goes on with the very next token.",
        "migration", "migrating a request", "request migration", "migrating", "a migration", "a migrated request",
    ),
    concept(
        "To abort a request means that we stop it ourselves.",
        "an abort", "aborting a request", "an aborted request", "abort", "aborting",
    ),
    concept(
        "To cancel a request means that the caller left. Its blocks are given back within one step.",
        "cancellation", "cancelling a request", "a cancelled request", "a cancel", "cancelling", "a cancellation",
    ),
    concept(
        "A timeout means that a deadline passed before the answer was ready.",
        "a timeout", "a request timeout", "a deadline that passed", "timeout", "a deadline", "a request that timed out",
    ),
    concept(
        "To fail means that something broke. A request that fails ends with an error, which says what to do.",
        "a failure", "failing", "a failed request", "a request that failed", "fail",
    ),
)  # fmt: skip
