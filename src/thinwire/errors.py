# SPDX-License-Identifier: Apache-2.0
"""Every error that thinwire raises on purpose.

    ThinwireError
    ├── ConfigError             an invalid recipe, topology or argument (exit code 2)
    ├── MismatchError           ranks have different models, recipes, versions or seeds
    ├── CommError               communication failed
    │   ├── PeerLostError           the connection to another rank is closed; also a ConnectionError
    │   └── CommTimeoutError        another rank did not answer within the timeout; also a TimeoutError
    ├── CheckpointError         a checkpoint is unreadable or does not fit the model
    └── NonFiniteError          a loss or a gradient is NaN or infinite

Every message contains the value, the rule that it violates and the fix.
"""


class ThinwireError(Exception):
    """The base class of every error that thinwire raises on purpose.

    Example:
        >>> from thinwire import LocalSGD, ThinwireError
        >>> try:
        ...     LocalSGD(period=0)
        ... except ThinwireError as error:
        ...     print(type(error).__name__)
        ConfigError
    """


class ConfigError(ThinwireError, ValueError):
    """A recipe, a topology or an argument is invalid.

    Example:
        >>> from thinwire import ConfigError, TopK
        >>> try:
        ...     TopK(fraction=2.0)
        ... except ConfigError as error:
        ...     print(error)
        fraction=2.0: must lie in (0, 1]. 0.01 is usual
    """


class MismatchError(ThinwireError):
    """Ranks disagree on the model, the recipe or a message; `attach` raises it on all ranks before step 0.

    Example:
        >>> import torch
        >>> from thinwire import MismatchError, run_threads
        >>> try:
        ...     run_threads(2, lambda comm: comm.all_reduce_(torch.ones(1 + comm.rank)).wait())
        ... except MismatchError:
        ...     print("the ranks' vectors differ in size")
        the ranks' vectors differ in size
    """


class CommError(ThinwireError):
    """Communication failed: a message is damaged, belongs to another step, or did not arrive.

    Example:
        >>> from thinwire import CommError, CommTimeoutError, PeerLostError
        >>> issubclass(PeerLostError, CommError), issubclass(PeerLostError, ConnectionError)
        (True, True)
        >>> issubclass(CommTimeoutError, CommError), issubclass(CommTimeoutError, TimeoutError)
        (True, True)
    """


class PeerLostError(CommError, ConnectionError):
    """The connection to another rank is closed, usually because its process ended.

    Example:
        >>> import torch
        >>> from thinwire import PeerLostError, run_threads
        >>> def work(comm):
        ...     if comm.rank == 1:
        ...         raise RuntimeError("out of memory")
        ...     try:
        ...         comm.all_reduce_(torch.ones(2)).wait()
        ...     except PeerLostError as error:
        ...         print(error)
        >>> try:
        ...     run_threads(2, work)
        ... except RuntimeError:
        ...     pass
        rank 1 was lost at step 0 (RuntimeError: out of memory)
    """


class CommTimeoutError(CommError, TimeoutError):
    """Another rank did not answer within the timeout.

    Example:
        >>> import torch
        >>> from thinwire import CommTimeoutError, run_threads
        >>> def work(comm):
        ...     if comm.rank == 0:
        ...         comm.send_recv(torch.ones(2), [], [1]).wait()
        >>> try:
        ...     run_threads(2, work, timeout=0.05)
        ... except CommTimeoutError as error:
        ...     print(error)
        rank 0 waited 0.05 s for a message from rank 1 at step 0
    """


class CheckpointError(ThinwireError):
    """A checkpoint cannot be read, or it belongs to another model or recipe.

    Example:
        >>> from pathlib import Path
        >>> from thinwire import CheckpointError
        >>> from thinwire.core.storage.rank_file import RankFile
        >>> try:
        ...     RankFile(Path("no-such-folder"), rank=0).read()
        ... except CheckpointError as error:
        ...     print(str(error).partition(" (")[0])
        no-such-folder/rank-0000.json: cannot be read
    """


class NonFiniteError(ThinwireError, ArithmeticError):
    """A loss or a gradient is NaN or infinite.

    Example:
        >>> from thinwire import NonFiniteError
        >>> issubclass(NonFiniteError, ArithmeticError)
        True
    """


def error_named(kind: str, text: str) -> ThinwireError:
    """Make the error that another process reported; an unknown class becomes ThinwireError."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, ThinwireError):
        return found(text)
    return ThinwireError(text)
