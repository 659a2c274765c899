"""Checks commands of manifests, compose files and units against the services' own settings.

Nothing is started. A command is `python -m MODULE ARGUMENTS` or `tandem ARGUMENTS`, with the variables that it gets.
Text that is substituted later, such as `$(POD_IP)`, stands for an address.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import typer

from control_plane import account_command, fleet_command
from control_plane.api.admin import operations
from control_plane.settings import ControlPlaneSettings
from encode_svc.settings import EncodeSettings
from kv_transfer_svc.settings import KvSettings
from tandem_client.cli.app import app
from tandem_runtime import health_check
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.server import split_address
from tandem_runtime.settings import SettingField, fields_of, load_settings
from tandem_worker import vllm_follower
from tandem_worker.settings import WorkerSettings

SERVICES: Mapping[str, tuple[str, type[Any]]] = {
    "control_plane": ("control", ControlPlaneSettings),
    "kv_transfer_svc": ("kv", KvSettings),
    "prefill_svc": ("prefill", WorkerSettings),
    "decode_svc": ("decode", WorkerSettings),
    "encode_svc": ("encode", EncodeSettings),
}
"""Modules, the names of their services, and their settings."""

FOLLOWER = vllm_follower.__name__
"""The module of another host of a worker with vLLM."""

VLLM_PYTHON = "/opt/vllm/bin/python"
"""The interpreter of vLLM's environment in the images that have it."""

TANDEM_COMMAND = "tandem_client.cli"
"""The module of the command `tandem`."""

_OF_ALL = {"TANDEM_STATE_DIR", "TANDEM_RUNTIME_DIR", "TANDEM_CONFIG"}
_OF_THE_CLIENT = {"TANDEM_BASE_URL", "TANDEM_TOKEN", "TANDEM_ACCOUNT"}
_ADDRESSES = ("listen", "advertise", "control", "replicas")
"""Settings whose names end so hold addresses."""
_SUBSTITUTED = re.compile(r"\$\(\w+\)|\$\{\w+[^}]*\}")
_STAND_IN = "10.0.0.1"


def check_command(module: str, args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the problems of `python -m module args...` with the variables `env`; [] if it would start.

    Found are unknown modules, flags and TANDEM_* variables, variables of another service, and values that the settings
    refuse. Addresses must be HOST:PORT.
    """
    args = [_SUBSTITUTED.sub(_STAND_IN, each) for each in args]
    env = {name: _SUBSTITUTED.sub(_STAND_IN, value) for name, value in env.items()}
    if module == health_check.__name__:
        return check_probe(["python", "-m", module, *args])
    if module == TANDEM_COMMAND:
        return [*_check_tandem(args), *_check_all_variables(env)]
    if module == FOLLOWER:
        return [*_refused(lambda: vllm_follower.parser().parse_args(args)), *_check_variables("decode_svc", env)]
    if module not in SERVICES:
        return [f"there is no module {module} to run; there are {', '.join(SERVICES)} and {TANDEM_COMMAND}"]
    return [*_check_settings(module, args, env), *_check_variables(module, env)]


def check_program(command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Return the problems of a whole command: `.../python -m MODULE ...`, `.../tandem ...`, or `sh -c` with such."""
    if not command:
        return ["the command is empty"]
    program = command[0].rpartition("/")[2]
    if program in ("sh", "bash") and command[1:2] == ["-c"]:
        found = list(commands_in(command[2]))
        return [problem for each in found for problem in check_program(each, env)] if found else ["no command of ours"]
    if program == "tandem":
        return check_command(TANDEM_COMMAND, command[1:], env)
    if re.fullmatch(r"python3?(\.\d+)?", program) and command[1:2] == ["-m"] and len(command) > 2:
        return check_command(command[2], command[3:], env)
    return [f"{' '.join(command[:3])} is no command of ours; write .../python -m MODULE ..., or .../tandem ..."]


def commands_in(script: str) -> Iterator[list[str]]:
    """Yield the commands of ours in a shell script: simple words, up to an operator or the end of the line."""
    for words in re.findall(r"(?:^|[\s($\"])((?:\S*/)?python3? -m [^;&|\n)\"]*)", script):
        yield [word for word in str(words).split() if not word.startswith(("2>", ">"))]


def check_probe(command: Sequence[str], timeout_seconds: float | None = None) -> list[str]:
    """Return the problems of `python -m tandem_runtime.health_check ...`.

    With `timeout_seconds`, after which the caller ends the probe, the probe's own --seconds must be shorter.
    """
    if list(command[1:3]) != ["-m", health_check.__name__]:
        return [f"{' '.join(command[:3])} is no probe; write .../python -m {health_check.__name__} ADDRESS ..."]
    flags: list[Any] = []
    if problems := _refused(lambda: flags.append(health_check._parser().parse_args(command[3:]))):
        return problems
    problems = _check_address("the probe's address", flags[0].address)
    if timeout_seconds is not None and flags[0].seconds >= timeout_seconds:
        problems.append(
            f"the probe waits {flags[0].seconds:g} s and is ended after {timeout_seconds:g} s, before it can say why; "
            "lower --seconds, or raise the time-out"
        )
    return problems


def check_http_probe(path: str, port: int, listen: str = ControlPlaneSettings.listen) -> list[str]:
    """Return the problems of an HTTP probe of a gateway with --listen `listen`."""
    paths = {route.path for route in operations.routes()}
    problems = [] if path in paths else [f"the gateway has no {path}; it has {', '.join(sorted(paths))}"]
    if (wanted := split_address(_SUBSTITUTED.sub(_STAND_IN, listen))[1]) != port:
        problems.append(f"the probe asks port {port}, the gateway listens on {wanted}")
    return problems


def load(module: str, args: Sequence[str], env: Mapping[str, str]) -> Any:
    """Return the settings object that the command would run with. Raises ValueError with what it would print."""
    service, settings = SERVICES[module]
    held: list[Any] = []
    variables = {name: value for name, value in env.items() if name != "TANDEM_CONFIG"}  # the file is elsewhere
    if variables.get("TANDEM_VLLM_PYTHON") == VLLM_PYTHON:
        variables["TANDEM_VLLM_PYTHON"] = sys.executable
    with mock.patch.dict(os.environ, variables, clear=True):
        problems = _refused(lambda: held.append(load_settings(settings, service, list(args))))
    if problems:
        raise ValueError("; ".join(problems))
    return held[0]


# ------------------------------------------------------------------------------------------------- settings


def _check_settings(module: str, args: Sequence[str], env: Mapping[str, str]) -> list[str]:
    if module == "control_plane" and args and args[0] in _ACTIONS:
        rest: list[str] = []
        parser = _ACTIONS[args[0]]._parser()
        if problems := _refused(lambda: rest.extend(parser.parse_known_args(args[1:])[1])):
            return problems
        args = rest
    try:
        settings = load(module, args, env)
    except ValueError as error:
        return [str(error)]
    return [
        problem
        for field in fields_of(type(settings), SERVICES[module][0])
        if field.name.endswith(_ADDRESSES)
        for value in _texts(getattr(settings, field.name))
        for problem in _check_address(field.flag, value)
    ]


_ACTIONS = {"account": account_command, "fleet": fleet_command}


def _texts(value: Any) -> list[str]:
    """Return the addresses of a setting; an empty one is not set."""
    return [str(each) for each in (value if isinstance(value, tuple) else (value,)) if each]


def _check_address(name: str, address: str) -> list[str]:
    if address.startswith("unix:"):
        return []
    try:
        split_address(address)
    except InvalidRequest as error:
        return [f"{name}: {error.message}"]
    return []


def _check_tandem(args: Sequence[str]) -> list[str]:
    """Parse as `tandem` does, and run nothing."""
    command: Any = typer.main.get_command(app)
    path, rest = ["tandem"], list(args)
    while names := getattr(command, "commands", None):
        if not rest or rest[0] not in names:
            return [f"there is no command {' '.join([*path, *rest[:1]])}; there are {', '.join(sorted(names))}"]
        command = names[rest[0]]
        path.append(rest.pop(0))
    return _refused(lambda: command.make_context(" ".join(path), rest))


def _refused(parse: Callable[[], object]) -> list[str]:
    """Return what a parser prints before it ends the process; [] if it does not."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            parse()
    except SystemExit:
        lines = printed.getvalue().strip().splitlines()
        return [lines[-1].partition("error: ")[2] or lines[-1] if lines else "it prints its help, and ends"]
    except Exception as error:  # of click, or of the copy of click that is part of typer since 0.29
        if not hasattr(error, "format_message"):
            raise
        return [str(error.format_message())]
    return []


# ------------------------------------------------------------------------------------------------- variables


@dataclass(frozen=True)
class _Variables:
    """The variables of one module, and of all others."""

    own: Mapping[str, SettingField]
    others: Mapping[str, str]
    """Variables that only other services read, and the module that reads them."""


def _variables(module: str) -> _Variables:
    service, settings = SERVICES[module]
    own = {name: field for field in _flags_of(settings, service) for name in field.variables}
    others: dict[str, str] = {}
    for other, (its_service, its_settings) in SERVICES.items():
        for field in _flags_of(its_settings, its_service):
            others |= {name: other for name in field.variables[:1] if name not in own}
    return _Variables(own, others)


def _flags_of(settings: type[Any], service: str) -> list[SettingField]:
    return [field for field in fields_of(settings, service) if not field.file_only]


def _shared_names() -> set[str]:
    """Return the variables that several services read: all processes of a host may have them."""
    return {
        field.variables[-1]
        for service, settings in SERVICES.values()
        for field in _flags_of(settings, service)
        if field.shared
    }


def _check_variables(module: str, env: Mapping[str, str]) -> list[str]:
    variables, shared = _variables(module), _shared_names()
    problems = []
    for name in env:
        if not name.startswith("TANDEM_") or name in _OF_ALL or name in variables.own or name in shared:
            continue
        if name in variables.others:
            problems.append(f"{name} is of {variables.others[name]}; {module} does not read it")
        else:
            problems.append(_unknown(name, {*variables.own, *shared, *_OF_ALL}))
    return problems


def _check_all_variables(env: Mapping[str, str]) -> list[str]:
    """Check the variables of `tandem`, whose services inherit them."""
    fields = {
        name: field
        for service, settings in SERVICES.values()
        for field in _flags_of(settings, service)
        for name in field.variables
    }
    problems = []
    for name, value in env.items():
        if name in fields:
            try:
                fields[name].parse(name, value)
            except ValueError as error:
                problems.append(str(error))
        elif name.startswith("TANDEM_") and name not in _OF_ALL | _OF_THE_CLIENT:
            problems.append(_unknown(name, {*fields, *_OF_ALL, *_OF_THE_CLIENT}))
    return problems


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f"no setting has the variable {name}" + (f"; is {near[0]} meant?" if near else "")
