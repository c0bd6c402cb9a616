"""OPT: positions with an offset of two rows, pre-norm and post-norm, an embedding narrower than the model."""

import functools

import jax
import numpy as np
import optax

from redeqx import Loss
from redeqx.models.opt import OPT, OPTConfig
from tests.models.families._case import Case, Training

VOCAB, SEQ = 44, 9


def make(**kwargs):
    import transformers

    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 16, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**{**sizes, "num_attention_heads": 4, **kwargs})).eval()


def run(module, inputs):
    import torch

    mask = torch.tensor(inputs["mask"]).long() if "mask" in inputs else None
    return module(torch.tensor(inputs["ids"]), attention_mask=mask).logits


rng = np.random.default_rng(0)
# Without the padding id 1: torch gives its embedding no gradient, whether it is masked or not.
IDS = rng.integers(2, VOCAB, (2, SEQ)).astype(np.int32)
LEFT = np.arange(SEQ) >= np.array([[0], [3]])  # the second row has three padding tokens on the left
RIGHT = np.arange(SEQ) < np.array([[SEQ], [6]])
make_350m = functools.partial(make, do_layer_norm_before=False, word_embed_proj_dim=16)
# As in the models of the Galactica paper.
make_plain = functools.partial(make, enable_bias=False, layer_norm_elementwise_affine=False, activation_function="gelu")

CASES = [
    Case("opt", make, {"ids": IDS}, run, gradients=True),
    Case("opt-left-padded", make, {"ids": np.where(LEFT, IDS, 1), "mask": LEFT}, run, counts=LEFT, generates=True),
    Case("opt-right-padded", make, {"ids": np.where(RIGHT, IDS, 1), "mask": RIGHT}, run, counts=RIGHT),
    Case("opt-350m", make_350m, {"ids": IDS, "mask": LEFT}, run, counts=LEFT),
    Case("opt-350m-untied", functools.partial(make_350m, tie_word_embeddings=False), {"ids": IDS}, run, gradients=True),
    Case("opt-untied", functools.partial(make, tie_word_embeddings=False, ffn_dim=128), {"ids": IDS}, run),
    Case("opt-no-bias", make_plain, {"ids": IDS}, run),
    Case("opt-no-final-norm", functools.partial(make, _remove_final_layer_norm=True), {"ids": IDS}, run),
    Case("opt-last-position", functools.partial(make, max_position_embeddings=SEQ), {"ids": IDS}, run),
]


def loss_fn(model, batch, key):
    """The cross-entropy of each next token."""
    inputs, labels = batch["ids"][:, :-1], batch["ids"][:, 1:]
    logits = jax.vmap(lambda ids, key: model(ids, key=key))(inputs, jax.random.split(key, len(inputs)))
    return Loss(optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), labels.size)


CONFIG = OPTConfig(64, 16, d_model=32, n_layers=2, n_heads=4, residual_dropout=0.0, init_std=0.1)
CONFIG_350M = OPTConfig(
    64, 16, 32, d_embedding=16, n_layers=2, n_heads=4, norm_places="sum", residual_dropout=0.0, init_std=0.1
)
EXAMPLES = [{"ids": row} for row in rng.integers(0, 64, (16, 9))]
TRAININGS = [
    Training("opt", lambda key: OPT(CONFIG, key=key), EXAMPLES, loss_fn),
    Training("opt-350m", lambda key: OPT(CONFIG_350M, key=key), EXAMPLES, loss_fn, learning_rate=0.5),
]
