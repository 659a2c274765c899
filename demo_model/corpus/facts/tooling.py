"""Facts: make, the environment variables, and the flags of the `tandem` commands."""

from demo_model.corpus.facts.fact import concept

TOOLING = (
    concept(
        "make run installs what Tandem needs into .venv and starts it with the built-in model.",
        "make run", "the make run command", "the command make run", "`make run`",
    ),
    concept(
        "make test runs all tests. Run make services once before it.",
        "make test", "the make test command", "the command make test", "`make test`",
    ),
    concept(
        "make check looks at style, types, import contracts and protos.",
        "make check", "the make check command", "the command make check", "`make check`",
    ),
    concept(
        "make services installs what some tests need: a C compiler and workerd.",
        "make services", "the make services command", "the command make services", "`make services`",
    ),
    concept(
        "TANDEM_BASE_URL says where clients and commands find Tandem. Without it they use http://127.0.0.1:8642.",
        "TANDEM_BASE_URL", "the TANDEM_BASE_URL variable", "the variable TANDEM_BASE_URL", "$TANDEM_BASE_URL",
    ),
    concept(
        "TANDEM_TOKEN is the token that the Python client sends with each request.",
        "TANDEM_TOKEN", "the TANDEM_TOKEN variable", "the variable TANDEM_TOKEN", "$TANDEM_TOKEN",
    ),
    concept(
        "--model says which model to serve or to ask. tandem up takes a folder or a Hub id; the default is "
        "@tandem/demo.",
        "--model", "the --model flag", "the model flag", "the flag --model",
    ),
    concept(
        "--decode says how many decode workers to start. The default is 1.",
        "--decode", "the --decode flag", "the decode flag", "the flag --decode",
    ),
    concept(
        "--host says on which address the gateway listens. The default is 127.0.0.1, this machine only.",
        "--host", "the --host flag", "the host flag", "the flag --host",
    ),
    concept(
        "--port says on which port the gateway listens. The default is 8642.",
        "--port", "the --port flag", "the port flag", "the flag --port",
    ),
    concept(
        "--grpc-port says at which port workers register. The default is 8643.",
        "--grpc-port", "the --grpc-port flag", "the flag --grpc-port", "port 8643", "the gRPC port",
    ),
    concept(
        "--config names the settings file of tandem up. Without it, tandem.toml is read if it is here.",
        "--config", "the --config flag", "the config flag", "the flag --config",
    ),
    concept(
        "--verbose shows what the processes of tandem up log. Its short form is -v.",
        "--verbose", "the --verbose flag", "the -v flag", "the flag --verbose",
    ),
    concept(
        "--url tells tandem run and tandem status where Tandem answers.",
        "--url", "the --url flag", "the url flag", "the flag --url",
    ),
    concept(
        "--watch makes tandem status show the fleet anew each second, until you press Ctrl-C.",
        "--watch", "the --watch flag", "tandem status --watch", "the flag --watch",
    ),
    concept(
        "--json prints the result of tandem run or tandem status as JSON.",
        "--json", "the --json flag", "the json flag", "the flag --json",
    ),
    concept(
        "--raw makes tandem run send the prompt without the model's chat template.",
        "--raw", "the --raw flag", "tandem run --raw", "the flag --raw",
    ),
    concept(
        "--system gives tandem run a system message that goes before the prompt.",
        "--system", "the --system flag", "tandem run --system", "the flag --system",
    ),
    concept(
        "--no-stream makes tandem run print the answer when it is complete, not token by token.",
        "--no-stream", "the --no-stream flag", "tandem run --no-stream", "the flag --no-stream",
    ),
)  # fmt: skip
