"""The version of redeqx, in this one place: `pyproject.toml` reads it when a wheel is built."""

__version__ = "0.1.0"
"""The version of redeqx, such as `"0.1.0"`. Checkpoints record it."""
