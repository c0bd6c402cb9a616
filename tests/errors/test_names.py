"""Arguments that a function does not take: the error says where redeqx has what they are for."""

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import redeqx


@pytest.fixture(scope="module")
def functions():
    deployer = redeqx.Deployer(verbose=False)
    made = {
        "model": eqx.nn.Linear(4, 4, key=jax.random.key(0)),
        "optimizer": optax.sgd(0.1),
        "collate_fn": np.stack,
        "loss_fn": lambda model, batch, key: jax.vmap(model)(batch).mean(),
    }
    trainer = redeqx.Trainer(deployer, **made)
    of_predictor = {"collate_fn": np.stack, "pred_fn": lambda model, batch, key: jax.vmap(model)(batch)}
    predictor = redeqx.Predictor(deployer, **of_predictor)
    return {
        "Deployer": redeqx.Deployer,
        "Trainer": lambda **given: redeqx.Trainer(deployer, **made, **given),
        "fit": lambda **given: trainer.fit([np.zeros(4)], **given),
        "train": lambda **given: trainer.train([np.zeros(4)], **given),
        "predict": lambda **given: predictor.predict([np.zeros(4)], **given),
        "Predictor": lambda **given: redeqx.Predictor(deployer, **of_predictor, **given),
    }


@pytest.mark.parametrize(
    ("of", "name", "next_step"),
    [
        # arguments of another function of redeqx
        ("Trainer", "workdir", "It is an argument of `Deployer`."),
        ("Trainer", "batch_size", "It is an argument of `fit`."),
        ("Trainer", "pred_fn", "It is an argument of `get_default_predictor`."),
        ("fit", "accumulate_grad_batches", "It is an argument of `Trainer`."),
        ("fit", "n_model_shards", "It is an argument of `Deployer`."),
        ("train", "n_epochs", "It is an argument of `fit`."),
        # names of other libraries, whose nearest argument means something else, or none is near
        ("Deployer", "n_tensor_shards", "Pass `Deployer(n_model_shards=)`."),
        ("Deployer", "tp", "Pass `Deployer(n_model_shards=)`."),
        ("Deployer", "tensor_parallel_size", "Pass `Deployer(n_model_shards=)`."),
        ("Deployer", "ici_fsdp_parallelism", "Pass `Deployer(n_fsdp_shards=)`."),
        ("Deployer", "n_context_shards", "Pass `Deployer(n_sequence_shards=)`."),
        ("Deployer", "n_devices", "Leave it out: all devices are used."),
        ("Deployer", "output_dir", "Pass `Deployer(workdir=)`."),
        ("Trainer", "bf16", "Pass `Trainer(compute='bfloat16')`."),
        ("Trainer", "gradient_accumulation_steps", "Pass `Trainer(accumulate_grad_batches=)`."),
        ("Trainer", "max_grad_norm", "Put it into the optimizer: `optax.chain(optax.clip_by_global_norm(1.0),"),
        ("Trainer", "train_dataset", "Pass `fit(train_examples)`."),
        ("fit", "eval_dataset", "Pass `fit(eval_examples=)`."),
        ("fit", "per_device_eval_batch_size", "Pass `fit(eval_per_device_batch_size=)`."),
        ("fit", "eval_steps", "Pass `fit(eval_every_n_steps=)`."),
        ("fit", "resume_from_checkpoint", "Leave it out: `fit` continues the run of its workdir."),
        # those of a function that takes examples, and of a predictor
        ("train", "dataset", "Pass it as `examples`."),
        ("predict", "test_dataset", "Pass it as `examples`."),
        ("Predictor", "batch_size", "It is an argument of `predict`."),
        ("fit", "save_dtype", "Did you mean `save_float_dtype`?"),
        # misspelt ones, and those that are near
        ("Deployer", "n_modle_shards", "Did you mean `n_model_shards`?"),
        ("fit", "num_train_epochs", "Did you mean `n_epochs`?"),
        ("fit", "per_device_train_batch_size", "Did you mean `per_device_batch_size`?"),
    ],
)
def test_an_unknown_argument_has_a_next_step(of, name, next_step, functions):
    with pytest.raises(TypeError) as raised:
        functions[of](**{name: 2})
    assert f"got an unknown one: `{name}`. {next_step}" in str(raised.value)
