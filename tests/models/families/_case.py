"""The test cases of the model families: tiny models of another library to compare with, and models to train.

Each file here is one family, with `CASES` and `TRAININGS`. `test_parity.py` compares every case with torch, `test_golden.py`
with stored outputs of torch (`tests/models/golden/`, written by `_make_golden.py`), `test_training.py` trains. torch,
transformers and diffusers are imported only inside functions.
"""

import importlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests._tree import drawn

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


@dataclass(frozen=True)
class Case:
    """One tiny model, and the inputs for which its outputs must equal those of another library.

    **Arguments:**

    - `name`: unique among all families.
    - `make`: makes the torch module, in eval mode; its weights are replaced by `fill`.
    - `inputs`: arrays by the names of our arguments, one row per example.
    - `run`: returns the torch module's outputs for the inputs, one tensor with one row per example; it is differentiable.
    - `call`: calls our model (in inference mode) on one example, a row of the inputs.
    - `counts`: a mask `[batch, ...]` of the outputs that are compared; None for all. Outputs at padding are undefined.
    - `generates`: whether `generate` is also compared, from the inputs `ids` (or `pixels`) and `mask`.
    - `gradients`: whether gradients of a loss are also compared, for all weights.
    """

    name: str
    make: Callable[[], Any]
    inputs: dict[str, np.ndarray]
    run: Callable[[Any, dict[str, np.ndarray]], Any]
    call: Callable[[Any, dict[str, Any]], Any] = lambda model, row: model(**row)
    counts: np.ndarray | None = None
    gradients: bool = False
    generates: bool = False


@dataclass(frozen=True)
class Training:
    """A tiny model to train. Its sizes are divisible by two, and dropout is off.

    **Arguments:**

    - `make`: makes the model from a key.
    - `examples`: 16 examples, each a dict of numpy arrays.
    - `loss_fn`: a function of `(model, batch, key)`, as in Trainer; `batch` is the stacked examples.
    - `learning_rate`: of SGD with momentum, for six steps over all examples; the loss must decrease by a tenth.
    - `zero_gradient`: globs of leaves whose gradient is zero in exact arithmetic: biases of keys, because of softmax.
    """

    name: str
    make: Callable[[Any], Any]
    examples: list[dict[str, np.ndarray]]
    loss_fn: Callable[..., Any]
    learning_rate: float = 0.1
    zero_gradient: tuple[str, ...] = ("*key.bias",)


def collect(what: str) -> list[Any]:
    """Returns the `CASES` or `TRAININGS` of all families."""
    modules = [importlib.import_module(f"tests.models.families.{family}") for family in FAMILIES]
    return [case for module in modules for case in getattr(module, what)]


# --- deterministic weights --------------------------------------------------------------------------------------------


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the weights of a tensor, which depend only on its name and shape: matrices with rows of length about 1, scales
    about 1, biases about 0."""
    n = int(np.prod(shape))
    mixed = (np.arange(n, dtype=np.uint64) + 1 + np.uint64(zlib.crc32(name.encode()))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    uniform = ((mixed >> np.uint64(40)).astype(np.float64) / 2**24 * 2 - 1).reshape(shape)
    if len(shape) < 2:
        uniform = 0.1 * uniform + (0 if "bias" in name or not shape else 1)
    else:
        uniform *= np.sqrt(3 / np.prod(shape[1:]))
    return np.asarray(uniform, np.float32)  # arithmetic turns arrays without dims into scalars


def weights_file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def shapes(path: Path) -> dict[str, list[int]]:
    """Returns the shapes of a file's tensors by name."""
    with safe_open(path, "np") as file:
        return {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}


def fill(path: Path, tensors: dict[str, list[int]]) -> None:
    """Writes a safetensors file of these tensors, with the values of `values`."""
    save_file({name: values(name, tuple(shape)) for name, shape in tensors.items()}, path, metadata={"format": "pt"})


def torch_folder(case: Case, folder: Path) -> Any:
    """Saves a case by its own library, replaces its weights by `fill`, and returns the torch module that loads it."""
    module = case.make()
    module.save_pretrained(folder)
    path = weights_file(folder)
    fill(path, shapes(path))
    return type(module).from_pretrained(folder).eval()


def is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def random_model(cls: Any, config: Any, *, std: float = 0.3) -> Any:
    """Returns a model with random values in every leaf, also in biases and norms. They need no compilation."""
    return drawn(eqx.filter_eval_shape(cls, config, key=jax.random.key(0)), std)


def in_float64(model: Any) -> Any:
    """Returns `model` in float64; requires `jax.enable_x64`."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if eqx.is_inexact_array(leaf) else leaf, model)


# --- gradients ---------------------------------------------------------------------------------------------------------


def gradients(
    case: Case, module: Any, model: Any, weight_map: Any, folder: Path
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the gradients of the torch module and of our model, for each tensor on disk: those of the cross entropy of the
    outputs and random labels, and of the outputs times random weights, as a cross entropy does not change with their mean.

    **Arguments:**

    - `module`: the torch module with the same weights, whose parameters become their gradients.
    - `folder`: an empty one.
    """
    import torch

    from redeqx.models import cross_entropy  # here, as conftest.py imports this file before annotations are checked
    from redeqx.models.hf._save import to_disk

    for part in module.modules():  # our rows of padding have gradients, too
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None
    outputs = case.run(module, case.inputs)
    rng = np.random.default_rng(1)
    labels = rng.integers(0, outputs.shape[-1], outputs.shape[:-1])
    weights = rng.normal(size=outputs.shape).astype(np.float32)
    if case.counts is not None:
        counts = case.counts.reshape(case.counts.shape + (1,) * (outputs.ndim - case.counts.ndim))
        labels, weights = np.where(counts[..., 0], labels, -100), np.where(counts, weights, 0)
    rows = outputs.reshape(-1, outputs.shape[-1])
    entropy = torch.nn.functional.cross_entropy(rows, torch.tensor(labels.ravel()), reduction="sum")
    module.zero_grad()
    (entropy + (outputs * torch.tensor(weights)).sum()).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for buffer in module.buffers():  # they are not trained; our leaves for them have no gradient
            buffer.zero_()
    module.save_pretrained(folder)  # as if they were weights, since only files have common names

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model: Any) -> Any:
        outputs = call_rows(case, model, case.inputs)
        return cross_entropy(outputs, jnp.asarray(labels)).total + (outputs * weights).sum()

    model = eqx.nn.inference_mode(model)
    ours = to_disk(eqx.combine(gradient(model), model), weight_map)
    theirs = {weight_map.current(name): tensor for name, tensor in load_file(weights_file(folder)).items()}
    return {name: (theirs[name], np.asarray(tensor)) for name, tensor in ours.items()}


# --- calls --------------------------------------------------------------------------------------------------------------


def call_rows(case: Case, model: Any, inputs: dict[str, Any]) -> Any:
    """Returns our outputs for a batch."""
    return jax.vmap(lambda row: case.call(model, row))(inputs)


def outputs(case: Case, model: Any) -> np.ndarray:
    """Returns our outputs for the case's inputs, in inference mode, under jit."""
    model = eqx.nn.inference_mode(model)
    run = eqx.filter_jit(lambda model, inputs: call_rows(case, model, inputs))
    return np.asarray(run(model, jax.tree.map(jnp.asarray, case.inputs)))


def assert_equal(case: Case, found: np.ndarray, expected: np.ndarray, atol: float = 1e-4) -> None:
    """Checks that the outputs are equal where the case compares them, and that they are not constant."""
    assert found.shape == expected.shape
    counts = np.ones(1, bool) if case.counts is None else case.counts
    counts = np.broadcast_to(counts.reshape(counts.shape + (1,) * (expected.ndim - counts.ndim)), expected.shape)
    assert expected[counts].std() > 0.1, "outputs that hardly differ prove nothing"
    np.testing.assert_allclose(found[counts], expected[counts], rtol=0, atol=atol)


def golden_path(case: Case) -> Path:
    return Path(__file__).parents[1] / "golden" / f"{case.name}.json"


def read_golden(case: Case) -> dict[str, Any]:
    return json.loads(golden_path(case).read_text())
