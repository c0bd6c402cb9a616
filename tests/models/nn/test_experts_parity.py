"""`MixtureOfExperts` against the layers of `transformers`, outputs and gradients; needs the `parity` extra."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import equinox as eqx
import jax
import jax.numpy as jnp
import torch
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from redeqx.models.nn import MixtureOfExperts

# torch and its libraries emit deprecation warnings.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
D, HIDDEN, EXPERTS, CHOSEN, SEQ, ROWS = 32, 24, 8, 3, 17, 2

COMMON = {"hidden_size": D, "num_experts_per_tok": CHOSEN, "hidden_act": "silu", "experts_implementation": "eager"}
CASES = {
    "mixtral": (
        lambda: MixtralSparseMoeBlock(MixtralConfig(**COMMON, intermediate_size=HIDDEN, num_local_experts=EXPERTS)),
        {},
    ),
    **{
        f"qwen3, {'re' if renormalize else 'not '}normalized": (
            lambda renormalize=renormalize: Qwen3MoeSparseMoeBlock(
                Qwen3MoeConfig(**COMMON, moe_intermediate_size=HIDDEN, num_experts=EXPERTS, norm_topk_prob=renormalize)
            ),
            {"renormalize": renormalize},
        )
        for renormalize in (True, False)
    },
    "deepseek": (
        lambda: DeepseekV3MoE(
            DeepseekV3Config(
                **COMMON, moe_intermediate_size=HIDDEN, n_routed_experts=EXPERTS, n_group=1, topk_group=1, n_shared_experts=2
            )
        ),
        {"score": "sigmoid", "scale": 2.5, "has_correction": True, "d_shared": 2 * HIDDEN},
    ),
}


def torch_layer(make):
    layer = make()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (*layer.parameters(), *layer.buffers()):
            weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    return layer


def ours(layer, tensors):
    """Returns our layer with the tensors of theirs, by name."""
    gate, up = np.split(tensors["experts.gate_up_proj"], 2, axis=1)
    found = [tensors["gate.weight"], gate, up, tensors["experts.down_proj"]]
    where = lambda layer: [layer.router.weight, *(getattr(layer.experts, name).weight for name in ("gate", "up", "down"))]  # noqa: E731
    layer = eqx.tree_at(where, layer, list(map(jnp.asarray, found)))
    if layer.shared is not None:
        shared = [tensors[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")]
        where = lambda layer: [getattr(layer.shared, name).weight for name in ("gate", "up", "down")]  # noqa: E731
        layer = eqx.tree_at(where, layer, list(map(jnp.asarray, shared)))
    if layer.correction is not None:
        layer = eqx.tree_at(
            lambda layer: layer.correction,
            layer,
            jnp.asarray(tensors.get("gate.e_score_correction_bias", np.zeros(EXPERTS))),
        )
    return layer


@pytest.mark.parametrize("name", CASES)
def test_layer_of_transformers(name):
    make, options = CASES[name]
    theirs = torch_layer(make)
    layer = MixtureOfExperts(D, HIDDEN, EXPERTS, CHOSEN, key=jax.random.key(0), **options)
    layer = ours(layer, {name: tensor.numpy() for name, tensor in theirs.state_dict().items()})
    x = np.random.default_rng(0).normal(size=(ROWS, SEQ, D)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)

    their_x = torch.tensor(x, requires_grad=True)
    expected = theirs(their_x)
    (expected * torch.tensor(weights)).sum().backward()

    @eqx.filter_jit
    def run(layer, x):
        def total(args):
            y, routing = args[0](args[1])
            return jnp.sum(y * weights), (y, routing)

        return eqx.filter_value_and_grad(total, has_aux=True)((layer, x))

    (_, (y, routing)), (gradient, x_gradient) = run(layer, jnp.asarray(x))
    np.testing.assert_allclose(y, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x_gradient, their_x.grad.numpy(), rtol=1e-4, atol=1e-4)
    tensors = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    wanted = eqx.filter(ours(layer, tensors), eqx.is_array)
    for found, leaf in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, leaf, rtol=1e-4, atol=1e-4 * np.abs(leaf).max() + 1e-8)

    if layer.score == "softmax":
        for row in range(ROWS):
            logits = torch.tensor(x[row] @ np.asarray(layer.router.weight).T)
            balance = load_balancing_loss_func((logits,), EXPERTS, CHOSEN)
            np.testing.assert_allclose(routing.balance[row] / routing.tokens[row], balance, rtol=1e-5)
