"""Loads the settings of a process from flags, variables, tandem.toml and defaults.

    --field VALUE  >  TANDEM_<SERVICE>_<FIELD>  >  TANDEM_<FIELD>  >  tandem.toml  >  default

`TANDEM_<FIELD>` and the top level of tandem.toml hold shared fields only; other fields are in the service's table. The
file is `--config`, else `TANDEM_CONFIG`, else `tandem.toml` in the working directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from tandem_runtime import setting_values

T = TypeVar("T")


def setting(default: T, help: str, *, shared: bool = False, secret: bool = False, file_only: bool = False) -> T:
    """Declare a field of a settings dataclass: its default and one sentence with its unit.

    A shared field means the same to every service. A secret field is never printed. A field too large for a flag or a
    variable is read from tandem.toml only, by its type's class method `from_toml`.
    """
    metadata: dict[str, object] = {"help": help, "shared": shared, "secret": secret, "file_only": file_only}
    if isinstance(default, list):
        return cast(T, dataclasses.field(default_factory=default.copy, metadata=metadata, repr=not secret))
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def load_settings(cls: type[T], service: str, argv: Sequence[str] | None = None) -> T:
    """Build `cls`, a frozen dataclass of `setting` fields, for `service` ("prefill", "control", ...).

    `argv` defaults to the process's arguments. A bad value, an unknown flag, an unknown key of the service's table
    and a ValueError of `__post_init__` end the process with status 2 and a sentence that names the remedy.
    """
    fields = fields_of(cls, service)
    parser = _parser(cls, service, fields)
    flags = vars(parser.parse_args(argv))
    try:
        file = _read_file(flags.pop("config", None), service, fields)
        values = {field.name: value for field in fields for value in _look_up(field, flags, file)}
        return cls(**values)
    except ValueError as error:
        parser.error(str(error))


def describe(settings: object) -> dict[str, str]:
    """Return field names and values for operators; of secrets only whether they are set."""
    shown = {}
    for field in dataclasses.fields(cast(Any, settings)):
        value = getattr(settings, field.name)
        shown[field.name] = ("(set)" if value else "(not set)") if field.metadata.get("secret") else _show(value)
    return shown


@dataclasses.dataclass(frozen=True)
class SettingField:
    """A setting of a service, with the names it has for an operator."""

    name: str
    kind: Any
    default: Any
    help: str
    shared: bool
    secret: bool
    file_only: bool
    service: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variables(self) -> list[str]:
        own = f"TANDEM_{self.service.replace('-', '_')}_{self.name}".upper()
        return [own, f"TANDEM_{self.name}".upper()] if self.shared else [own]

    @property
    def default_text(self) -> str:
        """The default for operators; of a secret only whether it is set."""
        if self.secret:
            return "set" if self.default else "not set"
        return _show(self.default) or "none"

    def parse(self, source: str, text: str) -> Any:
        return self._checked(source, text, setting_values.from_text)

    def accept(self, source: str, value: Any) -> Any:
        if self.file_only:
            return self._explained(source, value)
        return self._checked(source, value, setting_values.from_toml)

    def _explained(self, source: str, value: Any) -> Any:
        """Read a structured value; its error names the part that does not fit."""
        try:
            return setting_values.from_toml(self.kind, value)
        except ValueError as error:
            raise ValueError(f"{source} does not fit: {error}") from None

    def _checked(self, source: str, value: Any, read: Any) -> Any:
        try:
            return read(self.kind, value)
        except ValueError as error:
            raise ValueError(
                f"{source} is {'a value' if self.secret else repr(value)}, which does not fit: {error}"
            ) from None


def fields_of(cls: type[Any], service: str) -> list[SettingField]:
    """Return the settings of `service` in the order of the dataclass."""
    hints = get_type_hints(cls)
    return [
        SettingField(
            name=field.name,
            kind=hints[field.name],
            default=field.default if field.default is not dataclasses.MISSING else cast(Any, field.default_factory)(),
            help=field.metadata["help"],
            shared=field.metadata["shared"],
            secret=field.metadata["secret"],
            file_only=field.metadata["file_only"],
            service=service,
        )
        for field in dataclasses.fields(cls)
        if field.init
    ]


def _look_up(field: SettingField, flags: Mapping[str, Any], file: _File) -> list[Any]:
    """Return the winning value in a list, or an empty list where the default applies."""
    if field.name in flags:
        value = flags[field.name]
        return [value if isinstance(value, bool) else field.parse(field.flag, value)]
    for variable in () if field.file_only else field.variables:
        if variable in os.environ:
            return [field.parse(variable, os.environ[variable])]
    return file.values_of(field)


# ------------------------------------------------------------------------------------------------- tandem.toml


_GATEWAY = "control"


@dataclasses.dataclass(frozen=True)
class _File:
    path: Path
    content: Mapping[str, Any]
    service: str

    def values_of(self, field: SettingField) -> list[Any]:
        """Return the file's value in a list, or an empty list; the service's table wins over the top level."""
        table = self.content.get(self.service, {})
        if field.name in table:
            return [field.accept(f"{field.name} in [{self.service}] of {self.path}", table[field.name])]
        if field.shared and field.name in self.content and not self._is_table(field.name):
            return [field.accept(f"{field.name} of {self.path}", self.content[field.name])]
        return []

    def _is_table(self, name: str) -> bool:
        """Return whether the file has a service's table of this name: `control` is a shared setting as well."""
        return name == _GATEWAY and isinstance(self.content[name], dict)


def _read_file(configured: str | None, service: str, fields: Sequence[SettingField]) -> _File:
    named = configured or os.environ.get("TANDEM_CONFIG")
    path = Path(named or "tandem.toml")
    if not named and not path.exists():
        return _File(path, {}, service)
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"cannot read the settings file {path}: {error}") from error
    _refuse_unknown_keys(path, content.get(service, {}), service, fields)
    return _File(path, content, service)


def _refuse_unknown_keys(path: Path, table: Any, service: str, fields: Sequence[SettingField]) -> None:
    if not isinstance(table, dict):
        raise ValueError(f"{service} in {path} must be a table, [{service}]")
    known = {field.name for field in fields}
    if unknown := sorted(table.keys() - known):
        raise ValueError(
            f"[{service}] of {path} has {', '.join(unknown)}, which no setting is called; "
            f"it knows {', '.join(sorted(known))}"
        )


# ------------------------------------------------------------------------------------------------- flags


def _parser(cls: type[Any], service: str, fields: Sequence[SettingField]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(service),
        description=(cls.__doc__ or "").strip().partition("\n")[0],
        epilog=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--config", metavar="PATH", help="Settings file [default: tandem.toml if it is there; $TANDEM_CONFIG]"
    )
    for field in fields:
        if not field.file_only:
            _add_flag(parser, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, field: SettingField) -> None:
    variables = ", ".join("$" + name for name in field.variables)
    help = f"{field.help} [default: {field.default_text}; {variables}]".replace("%", "%%")
    if field.kind is bool:
        parser.add_argument(field.flag, dest=field.name, action=argparse.BooleanOptionalAction, help=help)
    else:
        metavar = setting_values.placeholder(field.kind)
        parser.add_argument(field.flag, dest=field.name, metavar=metavar, help=help)


def _show(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in value)
    return {None: "", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _program(service: str) -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else service
