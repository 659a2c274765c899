"""Facts: how to do things with Tandem."""

from engine.demo.corpus.facts.fact import task

TASKS = (
    task(
        "Send \"stream\": true with your request. The tokens then come one by one as server-sent events.",
        "stream tokens", "stream the answer", "get tokens as they are generated", "turn on streaming",
    ),
    task(
        "Run tandem up. It starts all services and the built-in model on this machine.",
        "start Tandem", "start the server", "get Tandem running", "launch Tandem", "bring up the services",
    ),
    task(
        "Press Ctrl-C in the terminal of tandem up. The workers drain first and then stop.",
        "stop Tandem", "stop the server", "shut Tandem down", "quit tandem up",
    ),
    task(
        "Use tandem up --model with a Hub id or a folder, for example tandem up --model ./my-model.",
        "serve my own model", "use another model", "load a different model", "serve a model from a folder",
    ),
    task(
        "Point the OpenAI SDK at http://127.0.0.1:8642/v1 as its base URL. Nothing else changes.",
        "use the OpenAI SDK", "call Tandem with the OpenAI client", "connect an OpenAI client",
        "use the openai package",
    ),
    task(
        "POST your messages to http://127.0.0.1:8642/v1/chat/completions with curl.",
        "call Tandem with curl", "use curl", "send a request with curl", "make a raw HTTP request",
    ),
    task(
        "In a Worker, call await env.AI.run(\"@tandem/demo\", { prompt }). The binding sends it to Tandem.",
        "use the binding from a Worker", "call env.AI.run", "call a model from a Worker", "use env.AI",
    ),
    task(
        "In Python, write AI(\"http://127.0.0.1:8642\").run(model, inputs) with tandem_client.",
        "call Tandem from Python", "use the Python client", "use tandem_client", "run a model from Python",
    ),
    task(
        "Run tandem status. It lists every worker with its load and its free KV blocks.",
        "see the workers", "check the status", "list the workers", "see whether the workers are healthy",
    ),
    task(
        "Run tandem chat. It keeps the conversation until you leave with Ctrl-D.",
        "chat in the terminal", "talk to the model in my terminal", "open a chat", "have a conversation with the model",
    ),
    task(
        "Use tandem run with the model and a prompt: tandem run \"Hello\".",
        "run a single prompt", "send one prompt from the shell", "ask one question from the command line",
    ),
    task(
        "Set max_tokens in your request. The answer then ends after that many tokens.",
        "limit the length of an answer", "make answers shorter", "cap the output tokens", "limit the output",
    ),
    task(
        "Set temperature to 0. Then the most likely token is taken every time.",
        "get the same answer every time", "make answers deterministic", "turn off randomness", "get greedy decoding",
    ),
    task(
        "Set a seed in your request. The same seed and the same request give the same tokens.",
        "reproduce a sampled answer", "make sampling repeatable", "repeat a random answer",
    ),
    task(
        "Start more workers: tandem up --prefill 2 --decode 4 starts two for prefill and four for decode.",
        "add more workers", "scale Tandem", "start several workers", "run more decode workers",
    ),
    task(
        "Begin your prompts with the same text. The shared part is computed once and then comes from the prefix cache.",
        "use the prefix cache", "make prompts cheaper", "benefit from prompt caching", "reuse a long system prompt",
    ),
    task(
        "Look at usage.prompt_tokens_details.cached_tokens in the reply.",
        "see how many tokens were cached", "check the cache hits", "find the cached token count",
    ),
    task(
        "Close the connection. Tandem notices, stops the request and frees its KV blocks.",
        "cancel a request", "stop a running answer", "abort a stream",
    ),
    task(
        "Give tools in your request. The model answers with a tool call, and you send the result back as a tool "
        "message.",
        "use tools", "let the model call a function", "do function calling", "make tool calls",
    ),
    task(
        "Set response_format to a JSON schema. The engine then only allows tokens that fit it.",
        "get JSON output", "force valid JSON", "get structured output", "make the answer follow a schema",
    ),
    task(
        "Look at TTFT for prefill and at ITL for decode, and compare p50, p95 and p99 under the load you expect.",
        "measure latency", "benchmark Tandem", "measure the performance", "find out how fast Tandem is",
    ),
    task(
        "Send prompts of different lengths at the same time and watch the p99 of ITL. With disaggregation it stays "
        "flat.",
        "see the benefit of disaggregation", "test disaggregation", "show that disaggregation helps",
    ),
    task(
        "Put the settings in tandem.toml, or set TANDEM_ variables, or give flags. Flags win.",
        "change a setting", "configure Tandem", "set an option",
    ),
    task(
        "Use --listen with an address. Beyond this machine you also need TLS, or --insecure said aloud.",
        "reach Tandem from another machine", "listen on another address", "open Tandem to my network",
    ),
)  # fmt: skip
