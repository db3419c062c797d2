"""The command line: one thin module per command over the library.

Each module holds one frozen dataclass, whose fields are the flags, whose docstring is the help, and which is
called to do the work and return the exit code: 0 done, 1 failed, 2 the user's error, 130 interrupted.
"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors that thinwire knows are one message, never a traceback."""
    try:
        from thinwire.cli.commands import parse
    except ModuleNotFoundError as missing:
        sys.stderr.write(f"thinwire's command line needs {missing.name}: pip install 'thinwire[cli]'\n")
        return 2
    from thinwire.cli.console import complain
    from thinwire.errors import ConfigError, ThinwireError

    try:
        return parse(sys.argv[1:] if arguments is None else arguments)()
    except ConfigError as error:
        complain(error)
        return 2
    except ThinwireError as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
