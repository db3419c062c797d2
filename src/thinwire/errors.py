"""What can go wrong, by name.

    ThinwireError
    ├── ConfigError         a recipe, a topology or an argument that cannot work (exit code 2)
    ├── MismatchError       two ranks were started with different models, recipes, versions or seeds
    ├── CommError           a message did not arrive
    │   ├── PeerLostError       a peer's connection is gone
    │   └── CommTimeoutError       nobody answered in time
    ├── CheckpointError     a folder that cannot be read back, or does not fit
    └── NonFiniteError      a loss or a gradient is NaN or infinite

Every message quotes the value, the rule it breaks and the fix.
"""


class ThinwireError(Exception):
    """The root of every error thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """A recipe, a topology or an argument that cannot work."""


class MismatchError(ThinwireError):
    """Two ranks disagree on what is being trained; raised on all of them before step 0."""


class CommError(ThinwireError):
    """A message did not arrive."""


class PeerLostError(CommError):
    """The connection to a peer is gone, most often because its process ended."""


class CommTimeoutError(CommError):
    """A wait reached its deadline."""


class CheckpointError(ThinwireError):
    """A checkpoint that cannot be read back, or that belongs to another model or recipe."""


class NonFiniteError(ThinwireError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""
