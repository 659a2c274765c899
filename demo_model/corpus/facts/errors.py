"""Facts: the statuses and the errors that a request can meet, and what helps."""

from demo_model.corpus.facts.fact import Fact, concept, symptom


def _status(code: int, answer: str, *symptoms: str) -> tuple[Fact, Fact]:
    """Return the same answer for a status as a concept and as a symptom."""
    names = (f"a {code}", f"status {code}", f"error {code}", f"HTTP {code}", f"the status code {code}")
    met = (
        f"I get a {code}", f"I get status {code}", f"the gateway answers {code}",
        f"requests fail with status {code}", f"my request fails with {code}",
    )  # fmt: skip
    return concept(answer, *names), symptom(answer, *met, *symptoms)


STATUSES = (
    *_status(
        400,
        "A 400 means that the request is not valid. The error names the field, the value and the limit.",
        "it says bad request", "my request is rejected as invalid", "the request is refused as invalid",
    ),
    *_status(
        401,
        "A 401 means that your key is missing or wrong. Send it as Authorization: Bearer followed by your token.",
        "it says unauthorized", "my API key is refused", "my token is not accepted",
    ),
    *_status(
        404,
        "A 404 means that this model or this path does not exist here. The error lists the models that are served.",
        "the model is not found", "I get a 404 for the model", "it says model not found", "it says there is no model",
    ),
    *_status(
        405,
        "A 405 means that the path does not take this method. The error names the methods that are allowed.",
        "the method is not allowed", "it says method not allowed",
    ),
    *_status(
        408,
        "A 408 means that the request took longer than its deadline, 600 seconds by default. Ask for fewer tokens or "
        "more time.",
        "my request times out", "the request runs into a timeout", "it says the deadline passed",
        "the request takes too long",
    ),
    *_status(
        413,
        "A 413 means that the request body has more bytes than the limit, 10,000,000 by default. Send less.",
        "the body is too large", "it says the body has too many bytes", "my request is too large",
    ),
    *_status(
        429,
        "A 429 means that every worker is full. Wait as long as Retry-After says and send the request again.",
        "it says too many requests", "it says try again later", "every worker is busy",
        "it says capacity temporarily exceeded", "the queue is full",
    ),
    *_status(
        499,
        "A 499 means that the client closed the connection before the answer was there. Tandem stopped the request.",
        "the log says that the client closed the connection", "the log shows a 499",
    ),
    *_status(
        500,
        "A 500 means that something broke inside Tandem. The log of the server says more. Send the request again.",
        "it says internal error", "it says internal server error", "the server has an internal error",
    ),
    *_status(
        503,
        "A 503 means that no worker is ready yet. Wait until tandem status shows one, and look at the log of the "
        "worker.",
        "it says no worker is ready", "the service is unavailable", "no worker is ready", "/readyz answers 503",
    ),
)  # fmt: skip

_ERRORS = (
    symptom(
        "The body is not JSON. Check quotes, commas and braces, and send one JSON object.",
        "it says the body is not valid JSON", "my JSON is refused", "the body is not valid JSON",
        "it says the body is no object",
    ),
    symptom(
        "The request has no body. Send a JSON object, with curl by -d.",
        "it says the request has no body", "the body is missing", "it says that there is no body",
        "the request has no body",
    ),
    symptom(
        "There is no such endpoint. Check the path; the page at / lists the endpoints there are.",
        "it says no route", "the path is not found", "it says there is no route for my path", "the endpoint is missing",
    ),
    symptom(
        "That field is not known here. The error says which one you may have meant; correct it or leave it out.",
        "it says a field is unknown", "it says that is not a field of this request", "a field is refused",
        "it asks did you mean another field",
    ),
    symptom(
        "Tandem does not have that feature. It says so instead of ignoring it; leave the field out.",
        "it says not supported here", "a parameter is not supported", "it says unsupported_parameter",
        "an option is not supported",
    ),
    symptom(
        "The request has no messages. Send at least one, with a role and a content.",
        "it says messages is empty", "my messages are empty", "the list of messages is empty",
        "it wants at least one message",
    ),
    symptom(
        "The prompt is empty. Send at least one character or one token id.",
        "it says prompt is empty", "my prompt is empty", "an empty prompt is refused", "the prompt has no tokens",
    ),
    symptom(
        "A request to ai/run takes either a prompt or messages. Send exactly one of them.",
        "it says exactly one of prompt and messages is needed", "I sent both a prompt and messages",
        "it does not want prompt and messages together", "prompt and messages clash",
    ),
    symptom(
        "Your message has a text that is a control token of this model. Take it out.",
        "it says there is a control token in a message", "a control token is refused",
        "my message has a special token", "it says my text is a control token",
    ),
    symptom(
        "A token id is outside of this model's vocabulary. Use the tokenizer of the model you call.",
        "a token id is refused", "it says a token id is not in the vocabulary", "the token id is too large",
        "my token ids are refused",
    ),
    symptom(
        "Only text is taken here. Send parts of type text and leave images out.",
        "an image is refused", "my image part is not accepted", "it says only text parts are supported",
        "I cannot send an image",
    ),
    symptom(
        "Prompt and answer together need more KV memory than any worker has. Lower max_tokens, shorten the prompt or "
        "give the worker more KV memory.",
        "it says the prompt fits no decode worker's KV pool", "the request needs too many KV slots",
        "my request is larger than the KV pool", "the KV pool is too small",
    ),
    symptom(
        "That worker is draining: it finishes what runs and takes nothing new. Send the request again; another worker "
        "takes it.",
        "it says the worker is draining", "a worker is draining", "the worker accepts nothing new",
        "it says draining",
    ),
    symptom(
        "Two workers use the same name. Give each its own --worker-id.",
        "it says the incarnation is stale", "I see a stale incarnation", "two workers have the same id",
        "it says the worker was started again",
    ),
    symptom(
        "The KV blocks are gone, because their lease ended or their worker died. Send the request again.",
        "it says the KV is not found", "the KV blocks are not found", "the KV handle is not known", "the lease ran out",
    ),
    symptom(
        "The bytes of a KV block do not match their checksum, so Tandem does not use them. Send the request again.",
        "it says the KV is corrupt", "a checksum does not match", "a KV block is corrupt", "the KV data is damaged",
    ),
    symptom(
        "The model's chat template refuses these messages. Check the roles and their order.",
        "the chat template refuses my messages", "it says the template refuses these messages",
        "my roles are refused", "the order of my messages is refused",
    ),
    symptom(
        "The model's folder has no tokenizer.json. Add one and restart its workers.",
        "it says there is no tokenizer.json", "tokenizer.json is missing", "the tokenizer is missing",
        "the model has no tokenizer",
    ),
    symptom(
        "That folder does not exist. Give --model a folder with config.json and safetensors, or a Hub id.",
        "it says that --model is not a folder", "the model folder is not found", "my model folder is refused",
        "tandem up does not find my model",
    ),
    symptom(
        "Somebody must write the answers. Start at least one decode worker: tandem up --decode 1.",
        "it says --decode is 0", "tandem up refuses --decode 0", "there is no decode worker",
        "I started no decode worker",
    ),
    symptom(
        "The secret must be hexadecimal and long enough. Make one with openssl rand -hex 32.",
        "it says the secret is not hexadecimal", "my secret is refused", "the secret is too short",
        "the secret is not valid",
    ),
    symptom(
        "Ports below 1024 belong to the system. Choose one above 1023 with --port.",
        "it may not listen on port 80", "it says may not listen on that port", "a low port is refused",
        "I have no right to use the port",
    ),
    symptom(
        "Tandem needs Python 3.11 or newer. Install it, then run make run PYTHON=python3.11.",
        "it says that Python is too old", "my Python is too old", "it wants Python 3.11", "make run refuses my Python",
    ),
)  # fmt: skip

ERRORS = (*STATUSES, *_ERRORS)
