"""The checksum combined from pieces that several writers add equals zlib's checksum of the whole file."""

import random
import zlib

import numpy as np
import pytest

from redeqx.checkpoint._crc32 import Crc32, crc32_of


def combined_checksum(data, cuts, owners, n):
    """The checksum of `data`, split at `cuts`, where writer `owners[i]` of `n` adds piece `i`."""
    parts = [Crc32() for _ in range(n)]
    for start, stop, owner in zip([0, *cuts], [*cuts, len(data)], owners, strict=True):
        parts[owner].add(data[start:stop], start)
    return crc32_of([part.contribution(len(data)) for part in parts], len(data))


@pytest.mark.parametrize("seed", range(40))
def test_combined_checksum_equals_zlib(seed):
    """Includes empty pieces and writers without pieces."""
    draw = random.Random(seed)
    data = draw.randbytes(draw.choice([1, 2, 7, 255, 256, 4096, 100_001]))
    cuts = sorted(draw.randint(0, len(data)) for _ in range(draw.randint(0, 30)))
    n = draw.randint(1, 5)
    assert combined_checksum(data, cuts, [draw.randrange(n) for _ in range(len(cuts) + 1)], n) == zlib.crc32(data)


def test_interleaved_rows_combine_to_zlib_checksum():
    """As when several processes write column shards of a row-major matrix."""
    rows = np.random.default_rng(0).integers(0, 256, (50, 4, 33), np.uint8)
    header = b"a header of 23 bytes..."
    parts = [Crc32() for _ in range(5)]
    parts[4].add(header, 0)
    for owner in range(4):
        for i, row in enumerate(rows):
            parts[owner].add(row[owner].data, len(header) + (4 * i + owner) * 33)
    whole = header + rows.tobytes()
    contributions = [part.contribution(len(whole)) for part in parts]
    assert crc32_of(contributions, len(whole)) == zlib.crc32(whole)
    assert crc32_of(contributions[::-1], len(whole)) == zlib.crc32(whole)


def test_unwritten_bytes_count_as_zeros():
    crc32 = Crc32()
    crc32.add(b"abc", 5)
    assert crc32_of([crc32.contribution(20)], 20) == zlib.crc32(bytes(5) + b"abc" + bytes(12))
    assert crc32_of([], 20) == zlib.crc32(bytes(20))


def test_empty_file_has_checksum_zero():
    assert crc32_of([], 0) == zlib.crc32(b"") == 0
    empty = Crc32()
    empty.add(b"", 0)
    assert empty.contribution(0) == 0
    assert crc32_of([empty.contribution(0), Crc32().contribution(0)], 0) == 0


def test_contribution_can_be_read_between_pieces():
    data = random.Random(0).randbytes(100)
    crc32 = Crc32()
    for start in range(0, 100, 10):
        crc32.add(data[start : start + 10], start)
        stop = start + 10
        assert crc32_of([crc32.contribution(stop)], stop) == zlib.crc32(data[:stop])


def test_distant_offsets_contribute_modulo_the_period():
    """Adding `2**32 - 1` zero bytes before or after the pieces does not change their contribution."""
    period, data = 2**32 - 1, random.Random(0).randbytes(1000)
    near, far = Crc32(), Crc32()
    for start in (0, 300, 900):
        near.add(data[start : start + 100], 7 + start)
        far.add(data[start : start + 100], 7 + start + 2 * period)
    assert far.contribution(2000 + 5 * period) == near.contribution(2000)


def test_pieces_out_of_order_raise():
    crc32 = Crc32()
    crc32.add(b"abcd", 10)
    with pytest.raises(AssertionError, match="pieces come in the order of their offsets"):
        crc32.add(b"x", 13)
    crc32.add(b"x", 14)
    with pytest.raises(AssertionError, match="a file ends after its pieces"):
        crc32.contribution(14)
