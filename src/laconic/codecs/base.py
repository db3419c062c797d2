"""What a codec is: a vector to a payload and back."""

from abc import ABC, abstractmethod
from collections.abc import MutableMapping
from typing import ClassVar

from torch import Tensor

State = MutableMapping[str, Tensor]


class Codec(ABC):
    """A way to say a vector in fewer bytes; subclasses are frozen dataclasses.

    Attributes:
        linear: the payload of a sum is the sum of the payloads, so that the wire itself may add them up.
    """

    linear: ClassVar[bool] = False

    @abstractmethod
    def encode(self, x: Tensor, state: State) -> Tensor:
        """The payload of `x`: of any dtype the wire can add up where `linear`, else uint8.

        Args:
            x: a vector.
            state: named tensors this codec keeps between calls (error feedback); most keep none.
        """

    @abstractmethod
    def decode(self, payload: Tensor, like: Tensor) -> Tensor:
        """The vector that a payload stands for, in the dtype and size of `like`."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Bytes of the payload of n elements."""
