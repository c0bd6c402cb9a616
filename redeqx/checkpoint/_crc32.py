"""The crc32 of a file that is written in pieces, in any order and by several processes.

But for what it starts with, crc32 is linear: the checksum of a file is the exclusive or of what each of its pieces
contributes, had the rest been zeros. So every process sums up what it writes, and nothing is read back.

Zeros after a piece turn its checksum by a matrix of bits, as in zlib's `crc32_combine`.
"""

import zlib
from functools import lru_cache
from pathlib import Path

_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320  # of crc32, bits reversed
_CHUNK = 2**24  # bytes read at once


class Crc32:
    """What some pieces of a file contribute to its checksum.

    Pieces are added in the order of their offsets.
    """

    def __init__(self):
        self._register = 0
        self._stop = 0

    def add(self, data: memoryview | bytes, offset: int) -> None:
        """Add the bytes that begin at `offset`."""
        assert offset >= self._stop, "pieces come in the order of their offsets"
        register = _past_zeros(self._register, offset - self._stop)
        self._register = zlib.crc32(data, register ^ _ONES) ^ _ONES
        self._stop = offset + len(data)

    def contribution(self, size: int) -> int:
        """To a file of `size` bytes."""
        assert size >= self._stop, "a file ends after its pieces"
        return _past_zeros(self._register, size - self._stop)


def crc32_of_range(path: Path, start: int, stop: int) -> Crc32:
    """What the bytes `[start, stop)` of a file contribute; each is read once, in order. Raises OSError."""
    crc32 = Crc32()
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < stop and (chunk := file.read(min(_CHUNK, stop - start))):
            crc32.add(chunk, start)
            start += len(chunk)
    return crc32


def crc32_of(contributions: list[int], size: int) -> int:
    """The checksum of a file of `size` bytes, as `zlib.crc32` has it, from what all its pieces contribute."""
    total = _past_zeros(_ONES, size)
    for contribution in contributions:
        total ^= contribution
    return total ^ _ONES


def _past_zeros(register: int, n_bytes: int) -> int:
    """A register after that many zero bytes."""
    if not register or not n_bytes:
        return register
    a, b, c, d = _tables(n_bytes)
    return a[register & 255] ^ b[register >> 8 & 255] ^ c[register >> 16 & 255] ^ d[register >> 24]


@lru_cache(maxsize=256)  # the gaps between the rows of a shard are all alike
def _tables(n_bytes: int) -> tuple[list[int], ...]:
    """What that many zeros make of each of a register's four bytes."""
    columns = [1 << bit for bit in range(32)]
    power = 0
    while n_bytes >> power:
        if n_bytes >> power & 1:
            step = _power(power)
            columns = [_times(step, column) for column in columns]
        power += 1
    tables = []
    for byte in range(4):
        table = [0]
        for column in columns[8 * byte : 8 * byte + 8]:
            table += [entry ^ column for entry in table]
        tables.append(table)
    return tuple(tables)


@lru_cache(maxsize=64)
def _power(power: int) -> tuple[int, ...]:
    """The columns of the matrix for `2**power` zero bytes."""
    if power == 0:
        columns = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
        for _ in range(3):
            columns = tuple(_times(columns, column) for column in columns)
        return columns
    half = _power(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(columns: tuple[int, ...], vector: int) -> int:
    product = 0
    while vector:
        lowest = vector & -vector
        product ^= columns[lowest.bit_length() - 1]
        vector ^= lowest
    return product
