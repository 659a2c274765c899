"""Facts: how to do things with Tandem."""

from demo_model.corpus.facts.fact import task

TASKS = (
    task(
        "Send \"stream\": true with your request. The tokens then come one by one as server-sent events, and "
        "data: [DONE] ends the stream.",
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
        "see how Tandem is doing",
    ),
    task(
        "Run tandem chat. It keeps the conversation until you leave with Ctrl-D.",
        "chat in the terminal", "talk to the model in my terminal", "open a chat", "have a conversation with the model",
    ),
    task(
        "Use tandem run with a prompt: tandem run \"Hello\".",
        "run a single prompt", "send one prompt from the shell", "ask one question from the command line",
        "ask a question from the terminal",
    ),
    task(
        "Set max_tokens in your request. The answer then ends after that many tokens.",
        "limit the length of an answer", "make answers shorter", "cap the output tokens", "limit the output",
    ),
    task(
        "Set temperature to 0. Then the most likely token is taken every time.",
        "get the same answer every time", "make answers deterministic", "turn off randomness", "get greedy decoding",
        "set the temperature to 0",
    ),
    task(
        "Set a seed in your request. The same seed and the same request give the same tokens.",
        "reproduce a sampled answer", "make sampling repeatable", "repeat a random answer",
        "get the same random answer again", "use a seed",
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
        "see whether the prefix cache was hit",
    ),
    task(
        "Close the connection. Tandem notices, stops the request and frees its KV blocks.",
        "cancel a request", "stop a running answer", "abort a stream",
        "stop the model while it writes", "cancel an answer",
    ),
    task(
        "Give tools in your request. The model answers with a tool call, and you send the result back as a tool "
        "message.",
        "use tools", "let the model call a function", "do function calling", "make tool calls", "call tools",
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
        "measure the benefit of disaggregation",
    ),
    task(
        "Put the settings in tandem.toml, or set TANDEM_ variables, or give flags. Flags win.",
        "change a setting", "configure Tandem", "set an option", "give a setting", "change the settings",
    ),
    task(
        "Run tandem up --host 0.0.0.0 --insecure. Traffic is not encrypted, so do it only on a network you trust.",
        "reach Tandem from another machine", "listen on all addresses", "open Tandem to my network",
        "use Tandem over the network",
    ),
    task(
        "Run make run in the repository. It installs what is needed into .venv and starts Tandem.",
        "install Tandem", "set Tandem up", "get started with Tandem", "install and start Tandem", "try Tandem",
    ),
    task(
        "Run make services once, then make test.",
        "run the tests", "test my changes", "run all tests", "start the test suite",
    ),
    task(
        "Run make check. It looks at style, types and import contracts.",
        "check my code", "run the linter", "check the types", "check my changes before a commit",
    ),
    task(
        "Set TANDEM_BASE_URL to the address, or give --url with the command.",
        "point the commands at another server", "tell tandem run where Tandem is", "use a Tandem on another address",
        "set the base URL",
    ),
    task(
        "Use another port: tandem up --port 8700 --grpc-port 8701.",
        "change the port", "use another port", "run Tandem on a different port", "start a second Tandem",
    ),
    task(
        "GET http://127.0.0.1:8642/v1/models. It lists the models that are served.",
        "list the models", "see which models are served", "find the name of the model", "get the list of models",
    ),
    task(
        "GET /readyz. It answers 200 only after a request has really gone the whole way lately.",
        "check whether Tandem is ready", "know that Tandem is ready", "make a readiness probe",
        "wait until Tandem is ready",
    ),
    task(
        "GET /healthz. It answers as long as the process lives.",
        "check whether Tandem is alive", "make a liveness probe", "know that the process lives",
        "check the health of Tandem",
    ),
    task(
        "Run tandem status --watch. It shows the fleet anew each second.",
        "watch the workers", "follow the load of the workers", "keep an eye on the fleet", "watch the status",
    ),
    task(
        "Give tandem run the flag --json. It prints the whole result, usage included.",
        "print the result as JSON", "see the usage of tandem run", "get JSON from tandem run", "use the --json flag",
    ),
    task(
        "Run tandem up --prefill 0. The decode workers then read the prompts too.",
        "run without disaggregation", "run both halves in one worker", "turn off prefill workers",
        "use aggregated mode",
    ),
    task(
        "Send a message with the role system before the others. For tandem run, use --system.",
        "give a system prompt", "set a system message", "tell the model how to behave", "use a system prompt",
    ),
    task(
        "Give - as the prompt: echo \"Hello\" | tandem run - reads the prompt from standard input.",
        "pipe a prompt into tandem run", "read the prompt from standard input", "ask with a prompt from a file",
        "send a file as a prompt",
    ),
    task(
        "Run tandem up --verbose. It shows what the processes log.",
        "see the logs", "see what the processes log", "find out what went wrong", "debug a worker",
    ),
)  # fmt: skip
