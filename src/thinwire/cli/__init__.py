# SPDX-License-Identifier: Apache-2.0
"""The command line: one thin module per command over the library.

Each command is a frozen dataclass: its fields are the options, its docstring is the help, and calling it does the work
and returns the exit code: 0 done, 1 failed, 2 a mistake in the call, 130 interrupted, 141 where nobody reads on.
"""

import codecs
import os
import sys
from collections.abc import Callable, Sequence

_NOBODY_READS = 141  # as of a program that SIGPIPE ends
_PLAIN = str.maketrans({"µ": "u", "×": "x", "→": "->", "…": "...", "·": ".", "–": "-", "—": "-", "−": "-", "█": "#"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""

    def parse() -> Callable[[], int]:
        from thinwire.cli.commands import parse

        return parse(sys.argv[1:] if arguments is None else arguments)

    return run(parse)


def run(parse: Callable[[], Callable[[], int]]) -> int:
    """Run what `parse` returns and return its exit code; an expected error is one message, without a traceback."""
    _write_plainly()
    try:
        try:
            return _run(parse)
        finally:
            # Here, where it can be told that nobody reads, and not when Python ends.
            if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison]  # a closed one is None
                sys.stdout.flush()
    except KeyboardInterrupt:
        # At any time, also while modules are imported.
        sys.stderr.write("thinwire: interrupted\n")
        return 130
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return _NOBODY_READS


def _write_plainly() -> None:
    """Write a plain character for one that the output cannot encode, such as "x" for "×" in a log file in ASCII."""
    codecs.register_error("thinwire", _plain)
    for stream in (sys.stdout, sys.stderr):
        # None where closed; a program that calls `main` may have its own kind of stream.
        if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="thinwire")  # pyright: ignore[reportAttributeAccessIssue]


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(each if each.isascii() else "?" for each in text), error.end


def _nobody_reads() -> bool:
    """Whether it is the output that is closed, as by `| head`, and not a connection; what is left of it is dropped."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _run(parse: Callable[[], Callable[[], int]]) -> int:
    from thinwire.errors import ConfigError, ThinwireError

    command = None
    try:
        command = parse()
        return command()
    except ModuleNotFoundError as missing:
        if missing.name not in ("cyclopts", "rich"):
            raise
        sys.stderr.write(f"thinwire's command line needs {missing.name}: pip install 'thinwire[cli]'\n")
        return 2
    except ThinwireError as error:
        problem = str(error)
        if command is not None:
            from thinwire.cli.parsing import in_options

            problem = in_options(problem, command)
        _print_error(problem)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        # Of a file that the call names: one that is too long a name, in a folder that may not be read, on a full disk.
        if error.filename is None:
            raise
        _print_error(f"{str(error.filename)[:200]}: {error.strerror}")
        return 2


def _print_error(problem: object) -> None:
    try:
        from thinwire.cli.console import print_error
    except ModuleNotFoundError:  # without the extra `cli`
        sys.stderr.write(f"thinwire: {problem}\n")
        return
    print_error(problem)
