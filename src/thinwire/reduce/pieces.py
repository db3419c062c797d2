# SPDX-License-Identifier: Apache-2.0
"""How a vector is cut between ranks."""


def pieces(n: int, size: int, alignment: int) -> list[slice]:
    """Cut a vector of n elements into `size` pieces, end to end at multiples of `alignment`; the last are shorter."""
    length = -(-n // (size * alignment)) * alignment
    return [slice(min(rank * length, n), min((rank + 1) * length, n)) for rank in range(size)]
