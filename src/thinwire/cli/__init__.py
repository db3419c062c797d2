"""The command line: one thin module per command over the library.

Each command is a frozen dataclass: its fields are the options, its docstring is the help, and calling it does the work
and returns the exit code: 0 done, 1 failed, 2 a mistake in the call, 130 interrupted.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an expected error is printed as one message, without a traceback."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        # At any time, also while modules are imported.
        sys.stderr.write("thinwire: interrupted\n")
        return 130


def _run(arguments: Sequence[str]) -> int:
    try:
        from thinwire.cli.commands import parse
    except ModuleNotFoundError as missing:
        sys.stderr.write(f"thinwire's command line needs {missing.name}: pip install 'thinwire[cli]'\n")
        return 2
    from thinwire.cli.console import print_error
    from thinwire.errors import ConfigError, ThinwireError

    try:
        return parse(arguments)()
    except ConfigError as error:
        print_error(error)
        return 2
    except ThinwireError as error:
        print_error(error)
        return 1
    except OSError as error:
        # Of a file that the call names: one that is too long a name, in a folder that may not be read, on a full disk.
        if error.filename is None:
            raise
        print_error(f"{str(error.filename)[:200]}: {error.strerror}")
        return 2
