# SPDX-License-Identifier: Apache-2.0
"""A command's dataclass as a cyclopts program: its options, help, configuration file and error messages."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    RepeatArgumentError,
    Token,
)
from cyclopts.exceptions import UnknownOptionError, UnusedCliTokensError
from cyclopts.help import DefaultFormatter
from docstring_parser import parse as parse_docstring

from thinwire.cli.console import Output, err
from thinwire.core.storage.files import local_path
from thinwire.errors import ConfigError
from thinwire.lab.runs.settings import CONFIG_FILE, option_name

if TYPE_CHECKING:
    from cyclopts.argument import Argument, ArgumentCollection
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

OF_A_CALL = ("out", "resume", "json", "trace", "config", "check", "overwrite")
"""Options about one call rather than about what it computes; a configuration file cannot hold them."""
DEFAULT_FILE = "thinwire.toml"
_GROUPS = {
    "Model and data": "task model-size model loss data batch-size split coreset seed parameters dtype labels "
    "adapters targets",
    "Strategy": "strategy strategies switch tensor-parallel elastic late on-notice restarts",
    "Workers and links": "workers processes rendezvous link slow stall network doctor bucket prices "
    "compute-time step-seconds timeout device threads",
    "Optimizer": "optimizer lr momentum weight-decay warmup-steps schedule nonfinite beta1 beta2 eps alpha rho "
    "lr-decay rank lora-alpha lora-dropout adapter-seed",
    "Length": "steps seconds target-loss trials rounds halving",
    "Output": "out json trace open tensorboard eval-every eval-limit save-every keep resume overwrite config export",
}
_GROUP_OF = {
    option: Group(title, sort_key=place)
    for place, (title, options) in enumerate(_GROUPS.items(), start=1)
    for option in options.split()
}
_ARGUMENTS, _OTHERS = Group("Arguments", sort_key=0), Group("Options", sort_key=len(_GROUPS) + 1)
_MOST_UNGROUPED = 10
_EXAMPLES = {"parameters": "6.5e6", "seconds": "60", "target-loss": "2.5"}
_MOST_SHOWN = 200
# The end of an option's text that says what happens without the option.
_UNLESS_GIVEN = re.compile(r"^(?P<text>.*)(?:; |\. )(?P<default>[^;]+?),? unless given$", re.DOTALL)
_SETTING = re.compile(r"^(?P<name>[a-z_]+)=(?P<value>'[^']*'|[^\s:]+)")
# module:function or module:Class, which no value in DEFAULT_FILE may name.
_NAMES_CODE = re.compile(r"\b[A-Za-z_][\w.]*:[A-Za-z_]")


def parse_command(program: str, kind: type[Any], words: Sequence[str]) -> Callable[[], int]:
    """Return the command filled in with its options, or a function that has printed its help.

    Raises:
        ConfigError: an option is unknown, or its value cannot be read.
    """
    app = make_app(program, kind)
    if {"-h", "--help"} & set(words[: words.index("--")] if "--" in words else words):
        app.help_print([], console=Output())
        return lambda: 0
    for option in ("strategy", "strategies"):
        # Most recipes that were given without an option stand in the first place.
        if option in kind.__dataclass_fields__ and words and words[0].endswith(")") and not words[0].startswith("-"):
            raise ConfigError(f"{words[0]}: recipes are given with an option: {program} --{option} '{words[0]}'")
    if "late" in kind.__dataclass_fields__ and "elastic" in kind.__dataclass_fields__:
        words = _elastic_words(words)
    try:
        _, bound, _ = app.parse_args(list(words))
    except CycloptsError as error:
        raise ConfigError(_explain(error, program)) from None
    bound.arguments.pop("config", None)
    return kind(**bound.arguments)


def _elastic_words(words: Sequence[str]) -> list[str]:
    """Write `--elastic VALUE` as flags: `on`, `off`, or how rounds close without late workers."""
    found = list[str]()
    for word in words:
        before, after = found[-1:] == ["--elastic"], word.removeprefix("--elastic=")
        if before and not word.startswith("-"):
            after = word
            found.pop()
        elif after == word:
            found.append(word)
            continue
        found += {"on": ["--elastic"], "off": ["--no-elastic"]}.get(after, ["--elastic", "--late", after])
    return found


def make_app(program: str, kind: type[Any]) -> App:
    """Make the program that reads a command's options: keyword-only fields are options, others positional."""
    hints, texts = get_type_hints(kind), _texts(kind)
    configured = has_configuration(kind)
    grouped = len(fields(kind)) + configured > _MOST_UNGROUPED
    parameters = [_parameter(x.name, hints[x.name], texts, x.default, bool(x.kw_only), grouped) for x in fields(kind)]
    if configured:
        texts["config"] = (
            f"a TOML file of options, or the folder of an earlier run, which holds {CONFIG_FILE}. Options given here "
            f"override it, and --no-FLAG a flag of it; {DEFAULT_FILE} in the current folder unless given."
        )
        parameters.append(_parameter("config", Path | None, texts, None, True, grouped))

    def command() -> None:
        raise AssertionError("only its signature is used")

    command.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        sorted(parameters, key=lambda each: (each.kind, each.default is not each.empty))
    )
    return App(
        name=program,
        help=_description(kind),
        help_format="plaintext",
        help_formatter=_Formatter(),
        help_flags=(),
        version_flags=(),
        default_command=command,
        group_arguments=_ARGUMENTS,
        group_parameters=_OTHERS,
        config=(lambda _, __, arguments: _use_file(program, arguments),) if configured else (),
        exit_on_error=False,
        print_error=False,
    )


def has_configuration(kind: type[Any]) -> bool:
    """Return whether a command has enough options for a configuration file."""
    return sum(bool(each.kw_only) for each in fields(kind)) > _MOST_UNGROUPED


class _Formatter(DefaultFormatter):
    """Show options without `--no-FLAG`, which only overrides a flag of a configuration file."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        super().__call__(console, options, panel.copy(entries=[x.copy(negative_names=()) for x in panel.entries]))


def _description(kind: type[Any]) -> str:
    """Return a docstring without its list of options, each paragraph on one line unless it is indented."""
    text = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")[0]
    return "\n\n".join(x if x.startswith(" ") else " ".join(x.split()) for x in text.strip().split("\n\n"))


def _texts(kind: type[Any]) -> dict[str, str]:
    """Return the help of each field, from the docstrings of the class and its bases."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        _, _, listed = inspect.cleandoc(each.__doc__ or "").partition("\nArgs:\n")
        documented = parse_docstring(f"Text.\n\nArgs:\n{listed}") if listed else None
        for entry in documented.params if documented else ():
            found[entry.arg_name] = " ".join((entry.description or "").split())
    return found


def _parameter(
    name: str, hint: Any, texts: dict[str, str], default: Any, keyword: bool, grouped: bool
) -> inspect.Parameter:
    several = get_origin(hint) is tuple
    shape, text = inspect.Parameter, texts.get(name, "").removesuffix(".")
    shown = not (default is None or default is False or default is MISSING)
    without, option = _UNLESS_GIVEN.match(text) if default is None else None, option_name(name)

    def in_words(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    if several:
        (hint, _), default = get_args(hint), MISSING
    settings = Parameter(
        name=f"--{option}" if keyword else option,
        help=without["text"] if without else text,
        show_default=(lambda _: _uncapitalized(without["default"])) if without else in_words if shown else False,
        converter=_converter(option, hint),
        completer=_complete_recipe if option in ("strategy", "recipe") else None,
        allow_leading_hyphen=several,
        group=_GROUP_OF.get(option, _OTHERS) if grouped and keyword else None,
    )
    return shape(
        name,
        shape.VAR_POSITIONAL if several else shape.KEYWORD_ONLY if keyword else shape.POSITIONAL_ONLY,
        default=shape.empty if default is MISSING else default,
        annotation=Annotated[hint, settings],
    )


def _uncapitalized(text: str) -> str:
    """Begin a phrase in lower case; a recipe or an abbreviation keeps its capitals."""
    return text[0].lower() + text[1:] if re.match(r"[A-Z]?[a-z]+('s)?( |$)", text) else text


def _complete_recipe(_: object) -> list[str]:
    """Return every strategy with its default arguments; the stub names them, so that none is imported."""
    stub = (Path(__file__).parents[1] / "__init__.pyi").read_text(encoding="utf-8")
    return [
        f"{name}()" for name in re.findall(r"^from thinwire\.methods\.strategies\.\S+ import ([A-Z]\w+)", stub, re.M)
    ]


def _converter(option: str, hint: Any) -> Callable[[Any, Sequence[Token]], Any] | None:
    """Return the function that reads a value of this type; None for flags and text."""
    kind = _without_none(hint)

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        return _read(option, kind, tokens[0].value)

    return None if kind in (bool, str) else convert


def _without_none(hint: Any) -> Any:
    return next(x for x in get_args(hint) if x is not NoneType) if NoneType in get_args(hint) else hint


def _read(option: str, kind: Any, value: str) -> Any:
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        if value not in (*others, last):
            raise ValueError(f"must be {', '.join(others)} or {last}")
        return value
    if kind is Path:
        return local_path(value)
    try:
        return kind(value)
    except ValueError:
        number = "a whole number" if kind is int else "a number"
        raise ValueError(f"must be {number}, such as {_example(option, kind)}") from None


def _example(option: str, kind: Any) -> str:
    return "4" if kind is int else _EXAMPLES.get(option, "0.1")


# -- configuration files -----------------------------------------------------------------------------------------------


def _use_file(program: str, arguments: ArgumentCollection) -> None:
    """Give each option that the command line does not have the value that a file has for it."""
    options = {x.name.removeprefix("--"): x for x in arguments if x.name.startswith("--")}
    given = options["config"].tokens
    path = Path(given[0].value) if given else Path(DEFAULT_FILE)
    if not given and not path.is_file():
        return
    values, table = read_file(path), program.split()[-1]
    values = values.get(table, {}) if not given or isinstance(values.get(table), dict) else values
    for key, value in values.items():
        option = options.get(name := key.replace("_", "-"))
        if option is None or name in OF_A_CALL:
            known = [each for each in options if each not in OF_A_CALL]
            close = [x for x in known if f"{name}-".startswith(f"{x}-")] + get_close_matches(name, known, 1, 0.5)
            hint = f"; did you mean {close[0]}?" if close else f"; {program} --help lists the options"
            raise ConfigError(f"{path}: {key!r} is not an option of {program}{hint}")
        token = _token(path, key, value, option)
        if not given and _NAMES_CODE.search(token.value):
            raise ConfigError(
                f"{path}: {key} = {value!r} names code to import. A file that the command line does not name cannot do "
                f"that. Add --config {path} if you trust it"
            )
        if not option.tokens:
            option.append(token)
    if not given and values:
        err.print(f"options of {path}: {', '.join(values)}")


def _token(path: Path, key: str, value: Any, option: Argument) -> Token:
    if option.hint is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key} = {value!r}: must be true or false")
        return Token(keyword=option.name, implicit_value=value, source=str(path))
    if isinstance(value, list) and key == "strategies" and all(isinstance(each, str) for each in value):
        value = "; ".join(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{path}: {key} = {value!r}: must be text or a number, and lists are for strategies only")
    return Token(keyword=option.name, value=str(value), source=str(path))


def read_file(path: Path) -> dict[str, Any]:
    """Read a TOML file of options, or that of a run's folder.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    path = path / CONFIG_FILE if path.is_dir() else path
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({error.strerror}). A run saves its own as {CONFIG_FILE} in its folder"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f'--config {path}: is not valid TOML ({error}). Write lines like lr = 0.1 or task = "text"'
        ) from None


# -- errors ------------------------------------------------------------------------------------------------------------


def in_options(problem: str, command: object) -> str:
    """Return an error about a setting as one about the option that gave it, such as `--workers 0` for `workers=0`."""
    found = _SETTING.match(problem)
    if found is None or str(getattr(command, found["name"], None)) != found["value"].strip("'"):
        return problem
    return f"--{option_name(found['name'])} {found['value'].strip(chr(39))}{problem[found.end() :]}"


def _explain(error: CycloptsError, program: str) -> str:
    """Put a mistake in a call into the words of all other errors."""
    option = "" if error.argument is None else error.argument.name
    match error:
        case CoercionError(token=Token() as token):
            where = f"{token.source}: " * (token.source not in ("", "cli"))
            shown = option if option.startswith("--") else ""
            rule = "takes no value" if error.argument and error.argument.hint is bool else str(error.msg)
            return f"{where}{f'{shown} {token.value}'.strip()[:_MOST_SHOWN]}: {rule}"
        case MissingArgumentError() if error.keyword and error.argument is not None:
            return f"{option}: needs a value{_such_as(error.argument)}"
        case MissingArgumentError():
            shown = option if option.startswith("--") else option.upper()
            return f"{shown}: is missing. {program} --help shows an example"
        case RepeatArgumentError(token=token):
            return f"{token.keyword}: is given twice. Give it once"
        case UnknownOptionError(token=token):
            word = (token.keyword or token.value)[:_MOST_SHOWN]
            known = [x for each in error.argument_collection for x in each.names if x.startswith("--")]
            close = get_close_matches(word, known, 1, 0.5)
            hint = f"did you mean {close[0]}?" if close else f"{program} --help lists the options"
            return f"{word}: is not an option of {program}; {hint}"
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            return f"{first[:_MOST_SHOWN]}: is not expected here. {program} --help lists the options"
        case _:
            return str(error)


def _such_as(argument: Argument) -> str:
    kind = _without_none(argument.hint)
    if get_origin(kind) is Literal:
        return f", such as {get_args(kind)[0]}"
    return f", such as {_example(argument.name.removeprefix('--'), kind)}" if kind in (int, float) else ""
