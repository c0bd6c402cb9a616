"""A run resumes from a stored checkpoint, and ends bitwise equal to a run of the commit that stored it.

STORE=1 python -m pytest tests/promises/test_before_redesign.py    stores another first, where numbers must change
"""

import json
import os
import shutil
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import equinox as eqx
import jax
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

import redeqx

FOLDER = Path(__file__).parent / "before_redesign"
DATA = np.random.default_rng(0).normal(size=(22, 6)).astype(np.float32)


def loss_fn(model, batch, key):
    keep = jax.random.bernoulli(key, 0.9, batch[:, :5].shape)
    return ((jax.vmap(model)(batch[:, :5] * keep)[:, 0] - batch[:, 5]) ** 2).mean()


def cpu():
    """The processor's model name and vectors: another processor may round differently, also one of the same name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name, flags = (next((line for line in lines if line.startswith(of)), "") for of in ("model name", "flags"))
    return name.partition(":")[2].strip() + " with avx512" * (" avx512f " in flags)


class Stop(redeqx.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, metrics):
        if trainer.step == self.step:
            trainer.stop()


def run(workdir, stop=None):
    """Six steps of Adam, two epochs of three, on a mesh of 2 x 2 x 2."""
    deployer = redeqx.Deployer(5, n_model_shards=2, n_fsdp_shards=2, workdir=workdir, verbose=False)
    trainer = redeqx.Trainer(
        deployer,
        model=eqx.nn.MLP(5, 1, 16, 1, key=jax.random.key(1)),
        optimizer=optax.adam(1e-2),
        collate_fn=np.stack,
        loss_fn=loss_fn,
    )
    trainer.fit(
        DATA, n_epochs=2, batch_size=8, callbacks=[Stop(stop)], eval_examples=DATA[:5], save_argmin_ckpt_by_metrics=["loss"]
    )
    return trainer


def weights(trainer):
    names = ("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
    layers = trainer.model.layers
    leaves = (layers[0].weight, layers[0].bias, layers[1].weight, layers[1].bias)
    return dict(zip(names, map(np.asarray, leaves), strict=True))


def losses(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {str(line["step"]): line["loss"] for line in lines if "loss" in line}


def crc32(tensors):
    return zlib.crc32(b"".join(tensors[name].tobytes() for name in sorted(tensors)))


def store():
    """Writes the checkpoint of the third step, and how the run ends."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    with TemporaryDirectory() as workdir:
        run(workdir, stop=3)
        shutil.copytree(Path(workdir, "ckpts"), FOLDER / "run" / "ckpts")
        shutil.copy(Path(workdir, "metrics.jsonl"), FOLDER / "run")
        final = weights(run(workdir))
        later = {step: loss for step, loss in losses(Path(workdir)).items() if int(step) > 3}
    save_file(final, FOLDER / "final.safetensors")
    expected = {"jax": jax.__version__, "cpu": cpu(), "losses": later, "crc32": crc32(final)}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def test_a_stored_checkpoint_resumes_to_the_same_bits(tmp_path):
    if os.environ.get("STORE"):
        store()
    expected = json.loads((FOLDER / "expected.json").read_text())
    shutil.copytree(FOLDER / "run", tmp_path, dirs_exist_ok=True)
    trainer = run(tmp_path)
    assert trainer.step == 6
    found, final = losses(tmp_path), load_file(FOLDER / "final.safetensors")
    assert list(found) == ["1", "2", "3", "4", "5", "6"]
    for name, leaf in weights(trainer).items():
        np.testing.assert_allclose(leaf, final[name], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([found[step] for step in expected["losses"]], list(expected["losses"].values()), rtol=1e-6)
    if (expected["jax"], expected["cpu"]) == (jax.__version__, cpu()):
        assert {step: found[step] for step in expected["losses"]} == expected["losses"]
        assert crc32(weights(trainer)) == expected["crc32"] == crc32(final)
