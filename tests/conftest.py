"""Eight simulated devices, every warning an error, every jaxtyping annotation checked by beartype."""

import os

# Before JAX starts its CPU client: with fewer cores than devices, collectives dispatched asynchronously deadlock unless
# the client believes that it has a thread for each.
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)

install_import_hook("redeqx", "beartype.beartype")


@pytest.fixture
def x64():
    """64-bit mode in all threads, as a user sets it; `jax.enable_x64` would not reach those that load data."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
