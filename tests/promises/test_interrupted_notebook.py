"""A Jupyter kernel interrupted inside `fit`, once or twice, wherever the fit is: the next fit trains to its end."""

import os
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.timeout(280)

SETUP = """
import os, time
from pathlib import Path
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import redeqx

place, fsync = None, os.fsync  # the place in which the next fit waits

def wait_at(here):
    if place == here:
        Path(f"at_{here}").touch()
        while not Path("go_on").exists():  # a call that Ctrl-C does not end, but whose handler runs between
            time.sleep(0.01)

def slow_fsync(file):
    wait_at("save")
    return fsync(file)

os.fsync = slow_fsync

class Slow(redeqx.Callback):
    def on_step(self, trainer, metrics):
        if trainer.step % 10 == 3:
            wait_at("step")
        if trainer.step % 10 == 7:  # while a thread saves step 5, which alone would not keep the fit from its end
            wait_at("save")

def score(examples, outputs):
    wait_at("evaluation")
    return {"score": float(np.mean(outputs))}

deployer = redeqx.Deployer(workdir="run", verbose=False)
trainer = redeqx.Trainer(
    deployer, model=eqx.nn.Linear(2, 1, key=jax.random.key(0)), optimizer=optax.sgd(0.1), collate_fn=np.stack,
    loss_fn=lambda model, batch, key: jnp.square(jax.vmap(model)(batch)).mean(),
)
examples = np.ones((80, 2), np.float32)
predictor = trainer.get_default_predictor(lambda model, batch, key: jax.vmap(model)(batch))

def fit():
    trainer.fit(
        examples, batch_size=8, callbacks=[Slow()], save_every_n_steps=5, eval_examples=examples[:8],
        eval_every_n_steps=4, eval_sanity_check=False, eval_predictor=predictor, eval_metric_fn=score,
    )

fit()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    manager, client = start_new_kernel(cwd=str(folder), env=env)
    yield Notebook(folder, manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


class Notebook:
    """A kernel: `run` returns the exception with which a cell ended, as `Name: text`, or else the trainer's step."""

    def __init__(self, folder, manager, client):
        self.folder, self.manager, self.client = folder, manager, client
        assert self.run(SETUP) == 10

    def run(self, cell, interrupts=0, at=None):
        (self.folder / "go_on").unlink(missing_ok=True)
        # By default, a kernel whose last cell failed aborts the cells that reach it in that moment.
        message = self.client.execute(cell, user_expressions={"step": "trainer.step"}, stop_on_error=False)
        if interrupts:
            wait_until((self.folder / f"at_{at}").exists)
        for _ in range(interrupts):
            self.manager.interrupt_kernel()
            time.sleep(0.7)
        (self.folder / "go_on").touch()
        while (reply := self.client.get_shell_msg(timeout=120))["parent_header"].get("msg_id") != message:
            pass
        content = reply["content"]
        if content["status"] == "error":
            return f"{content['ename']}: {content['evalue']}"
        return int(content["user_expressions"]["step"]["data"]["text/plain"])


def wait_until(holds):
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("place", "interrupts"),
    [
        ("step", 1), ("save", 1),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in [("step", 2), ("save", 2), ("evaluation", 1), ("evaluation", 2)]
        ),
    ],
)  # fmt: skip
def test_the_fit_after_an_interrupted_one_trains_to_its_end(notebook, place, interrupts):
    (notebook.folder / f"at_{place}").unlink(missing_ok=True)
    before = notebook.run("pass")
    ended = notebook.run(f"place = {place!r}\nfit()", interrupts, place)
    stopped = notebook.run("pass")
    assert before < stopped < before + 10, ended
    assert ended == "KeyboardInterrupt: " + f"step {stopped} is saved" * (interrupts == 1)
    assert notebook.run("fit()") == before + 10  # the rest of the interrupted fit
    assert notebook.run("fit()") == before + 20
