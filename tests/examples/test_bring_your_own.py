"""A model of raw arrays: it learns on a mesh, and another run starts from its checkpoint."""

import pytest

from tests.examples._run import run_example

TINY = ("--n-epochs", 3, "--batch-size", 32, "--learning-rate", 0.01)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("bring_your_own")
    return workdir, run_example("bring_your_own", *TINY, workdir=workdir)


@pytest.mark.sweep
def test_learns(finished):
    workdir, outcome = finished
    losses = outcome.series("loss")
    assert losses[-1] < 0.5 * losses[0]
    assert outcome.series("test_accuracy")[-1] > 0.5
    assert outcome.series("eval_accuracy")[-1] > 0.5
    assert (workdir / "test.png").read_bytes().startswith(b"\x89PNG")
    assert "data=2 x fsdp=1 x model=2" in outcome.output
    assert str(workdir / "test.png") in outcome.output


@pytest.mark.sweep
def test_starts_from_a_checkpoint(finished, tmp_path):
    workdir, first = finished
    newest = workdir / "ckpts" / f"step_{len(first.series('loss')):08}"
    flags = ("--pretrained", newest, "--n-epochs", 1, "--batch-size", 419)
    again = run_example("bring_your_own", *flags, workdir=tmp_path)
    assert again.series("loss")[0] < 0.5 * first.series("loss")[0]
