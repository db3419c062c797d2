"""The command line: one thin module per command over the library.

Each command is a frozen dataclass: its fields are the options, its docstring is the help, and calling it does the work
and returns the exit code: 0 done, 1 failed, 2 a mistake in the call, 130 interrupted.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an expected error is printed as one message, without a traceback."""
    try:
        from thinwire.cli.commands import parse
    except ModuleNotFoundError as missing:
        sys.stderr.write(f"thinwire's command line needs {missing.name}: pip install 'thinwire[cli]'\n")
        return 2
    from thinwire.cli.console import print_error
    from thinwire.errors import ConfigError, ThinwireError

    try:
        return parse(sys.argv[1:] if arguments is None else arguments)()
    except ConfigError as error:
        print_error(error)
        return 2
    except ThinwireError as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
