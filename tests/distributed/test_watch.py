"""A run that hangs outside of its steps ends too: while it reads, predicts or scores the examples of an evaluation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 120.0  # seconds; each run takes about ten
SCRIPT = """
import os, sys, time
os.environ.setdefault("NPROC", "16")
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax, redeqx
jax.config.update("jax_platforms", "cpu")
(at,) = sys.argv[1:]

class Evaluated(list):
    def __getitem__(self, i):
        if at == "examples" and i == 9:
            time.sleep(600)
        return list.__getitem__(self, i)

def score(examples, outputs):
    if at == "metric" and len(examples) > 4:  # not in the sanity check
        time.sleep(600)
    return {"mean": float(np.mean(outputs))}

def output_fn(outputs):
    if at == "outputs" and trainer.step:
        time.sleep(600)
    return list(outputs)

deployer = redeqx.Deployer(timeouts=redeqx.Timeouts(hang=2))
model = eqx.nn.Linear(3, 1, key=jax.random.key(0))
trainer = redeqx.Trainer(
    deployer, model=model, optimizer=optax.sgd(0.1), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2),
)
rows = [np.ones(3, np.float32)] * 16
if at == "alone":
    trainer.update(rows)
    time.sleep(3)  # between updates a loop may do anything
    Evaluated.__getitem__ = lambda self, i: time.sleep(600) if i == 9 else rows[0]
    trainer.eval_loss(Evaluated(rows), batch_size=4)
trainer.fit(
    rows, batch_size=4, n_epochs=1, eval_examples=Evaluated(rows), eval_metric_fn=score,
    eval_predictor=trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch), output_fn),
)
print("ended")
"""
WHERE = {"metric": "in score", "outputs": "in output_fn", "examples": "in __getitem__", "alone": "in <lambda>"}


@pytest.mark.parametrize("at", WHERE)
@pytest.mark.sweep
def test_an_evaluation_that_hangs_is_noticed(at):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NPROC": "16", "XLA_FLAGS": ""}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, at], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert run.returncode == 75, run.stdout + run.stderr
    assert "redeqx: no progress for 2 s: " in run.stderr
    assert WHERE[at] in run.stderr  # the stack of the thread that hangs
    assert "ended" not in run.stdout
