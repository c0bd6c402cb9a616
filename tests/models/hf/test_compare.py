"""A module of the user's own against a folder: what differs is named, and what fits is loaded."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import redeqx
from redeqx.models import compare_weights, load_weights

D, N, VOCAB = 8, 3, 16


class Block(eqx.Module):
    mix: eqx.nn.Linear
    up: eqx.nn.Linear

    def __init__(self, key):
        self.mix, self.up = eqx.nn.Linear(D, D, key=key), eqx.nn.Linear(D, 2 * D, key=key)

    def __call__(self, x):
        return x + jnp.tanh(self.mix(x)) + jnp.tanh(self.up(x))[:D]


class Listed(eqx.Module):
    table: eqx.nn.Embedding
    blocks: list[Block]

    def __init__(self, key):
        self.table = eqx.nn.Embedding(VOCAB, D, key=key)
        self.blocks = [Block(each) for each in jax.random.split(key, N)]

    def __call__(self, id):
        x = self.table(id)
        for block in self.blocks:
            x = block(x)
        return x


class Stacked(eqx.Module):
    table: eqx.nn.Embedding
    blocks: Block

    def __init__(self, key):
        self.table = eqx.nn.Embedding(VOCAB, D, key=key)
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, N))


NAMES = {"table": "wte", "blocks.*.mix": "h.*.attn", "blocks.*.up": "h.*.fc.T"}
IDS = jnp.arange(VOCAB)


def run(model):
    return jax.vmap(model)(IDS)


@pytest.fixture(scope="module")
def stored():
    """A model, and its tensors under other names; `fc` is stored as [in, out]."""
    model = Listed(jax.random.key(0))
    tensors = {"wte.weight": model.table.weight}
    for i, block in enumerate(model.blocks):
        tensors |= {f"h.{i}.attn.weight": block.mix.weight, f"h.{i}.attn.bias": block.mix.bias}
        tensors |= {f"h.{i}.fc.weight": block.up.weight.T, f"h.{i}.fc.bias": block.up.bias}
    return model, {name: np.array(x) for name, x in tensors.items()}


@pytest.fixture
def folder(stored, tmp_path):
    def write(**changes):
        tensors = {**stored[1], **{name.replace("__", "."): array for name, array in changes.items()}}
        save_file(
            {name: np.ascontiguousarray(x) for name, x in tensors.items() if x is not None}, tmp_path / "model.safetensors"
        )
        return tmp_path

    return write


@pytest.mark.sweep
def test_own_module_is_loaded_by_names(stored, folder):
    model, path = stored[0], folder()
    other = Listed(jax.random.key(1))
    found = compare_weights(other, path, NAMES, run=run, expected=run(model))
    assert not found and found.output == 0 and found.n_equal == 1 + 4 * N
    assert str(found) == "13 leaves have a tensor of their shape\noutputs: differ by up to 0; up to 0.0001 is rounding"
    loaded = load_weights(other, path, NAMES)
    assert eqx.tree_equal(loaded, model)
    # Without outputs, the orientation of square matrices is open. Shapes are enough for the rest.
    shapes = eqx.filter_eval_shape(Listed, jax.random.key(0))
    found = compare_weights(shapes, path, NAMES)
    assert not found and found.unclear == tuple(f"`blocks.{i}.mix.weight`" for i in range(N))
    # A stack of layers, on a mesh.
    names = {"table": "wte", "blocks.mix": "h.{}.attn", "blocks.up": "h.{}.fc.T"}
    deployer = redeqx.Deployer(n_model_shards=2, n_fsdp_shards=2, verbose=False)
    stacked = load_weights(eqx.filter_eval_shape(Stacked, jax.random.key(0)), path, names, deployer=deployer)
    for i, block in enumerate(model.blocks):
        assert eqx.tree_equal(jax.tree.map(lambda x, i=i: x[i], stacked.blocks), block)
    assert len(stacked.blocks.up.weight.sharding.device_set) == 8


def test_differences_are_named(stored, folder):
    path = folder(
        h__1__attn__bias=None,
        h__1__atn__bias=np.zeros(D, np.float32),
        lm_head__weight=np.zeros((VOCAB, D)),
        h__0__fc__weight=np.zeros((2 * D, D)),
        wte__weight=np.zeros((VOCAB, D + 1)),
        rotary__freq=np.zeros(2),
    )
    found = compare_weights(stored[0], path, NAMES, ignored=["rotary.*"], run=run, expected=run(stored[0]))
    assert found and found.output is None  # nothing to run: not every leaf has a tensor
    assert found.missing == ("`blocks.1.mix.bias` (8,): no `h.1.attn.bias`. Did you mean `h.1.atn.bias`?",)
    assert found.unexpected == ("`h.1.atn.bias` (8,)", "`lm_head.weight` (16, 8)")
    assert found.shapes == ("`table.weight`: expected (16, 8), got (16, 9) in `wte.weight`",)
    assert found.transposed == ("`blocks.0.up.weight`: (16, 8), and `h.0.fc.weight` is (16, 8)",)
    for line in (*found.missing, *found.unexpected, *found.shapes, *found.transposed):
        assert f"  - {line}" in str(found)
    with pytest.raises(ValueError, match=r"(?s)got 6 that differ.*`h\.1\.attn\.bias`.*Did you mean `h\.1\.atn\.bias`"):
        load_weights(stored[0], path, NAMES)


@pytest.mark.parametrize("turned", ["mix", "nothing"])
def test_outputs_tell_which_square_matrices_are_transposed(stored, folder, turned):
    model, tensors = stored
    if turned == "mix":
        path = folder(**{f"h__{i}__attn__weight": tensors[f"h.{i}.attn.weight"].T for i in range(N)})
    else:
        path = folder(wte__weight=2 * tensors["wte.weight"])  # what no transposition explains
    found = compare_weights(model, path, NAMES, run=run, expected=run(model))
    assert found and found.output > 0.01
    if turned == "mix":
        (line,) = found.transposed
        assert line.startswith("`blocks.*.mix.weight`: the outputs differ by 0 if it is transposed")
        fixed = {**NAMES, "blocks.*.mix": "h.*.attn.T"}
        assert not compare_weights(model, path, fixed, run=run, expected=run(model))
    else:
        assert found.transposed == ()


def test_invalid_names_are_refused(stored, folder):
    with pytest.raises(ValueError, match=r"`names\['blocks\.\*\.mix'\]`: expected as many `\*` .*got 'attn'"):
        compare_weights(stored[0], folder(), {"blocks.*.mix": "attn"})
    with pytest.raises(ValueError, match=r"none`: expected a folder or a safetensors file, got none\. "):
        load_weights(stored[0], folder() / "none", NAMES)


def test_a_folder_of_redeqx_has_a_model_by_its_own_names(folder, tmp_path):
    """Leaves that no entry names are called the same in the folder."""
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    tensors = {
        f"layers.{i}.{name}": np.array(getattr(layer, name))
        for i, layer in enumerate(model.layers)
        for name in ("weight", "bias")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert not compare_weights(model, tmp_path)
    assert eqx.tree_equal(load_weights(eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(1)), tmp_path), model)


class Convolution(eqx.Module):
    conv: eqx.nn.Conv2d
    scale: jax.Array

    def __init__(self, key):
        self.conv, self.scale = eqx.nn.Conv2d(2, 3, 2, key=key), jnp.ones((1, 1, 3))


def test_dims_of_size_1_may_differ(tmp_path):
    """PyTorch's bias of a convolution is `[channels]`."""
    model = Convolution(jax.random.key(0))
    file = tmp_path / "unet.safetensors"  # one file, of another name
    tensors = {"conv.weight": model.conv.weight, "conv.bias": model.conv.bias.ravel(), "scale": model.scale[0]}
    save_file({name: np.array(x) for name, x in tensors.items()}, file)
    other = Convolution(jax.random.key(1))
    assert not compare_weights(
        other, file, run=lambda m: m.conv(jnp.ones((2, 4, 4))), expected=model.conv(jnp.ones((2, 4, 4)))
    )
    assert eqx.tree_equal(load_weights(other, file), model)
    save_file({"conv.weight": np.zeros((3, 2, 2, 2)), "conv.bias": np.zeros(4), "scale": np.zeros(3)}, file)
    assert compare_weights(other, file).shapes == ("`conv.bias`: expected (3, 1, 1), got (4,) in `conv.bias`",)
    message = (
        r"unet\.safetensors`: expected the tensors of the model's leaves, got 1 that differ:\n"
        r"  - `conv\.bias`: expected \(3, 1, 1\), as in the model, got \(4,\)\.\nName them in `names`; "
    )
    with pytest.raises(ValueError, match=message):
        load_weights(other, file)
