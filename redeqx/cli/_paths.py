"""Paths on the command line: on a disk, or in an object store."""

import argparse

from ..storage import Location, location


def as_location(text: str) -> Location:
    """Parses a path for `argparse`, which would drop the message of a ValueError."""
    try:
        return location(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
