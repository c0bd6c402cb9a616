"""Compares adapters with `peft`: folders that it wrote, folders that it reads, and gradients; needs `peft` in addition to
the `parity` extra."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import redeqx
from redeqx.models import from_pretrained, lora
from tests._tree import named_leaves
from tests.models.families._case import assert_equal, call_rows, collect, outputs, torch_folder
from tests.models.families._decoders import CASES as DECODERS, HEADED

# torch and its libraries emit deprecation warnings.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
# Of an adapter's entries: with larger ones some models become so steep that torch itself is 1e-4 from the truth.
SIZE = 0.5
CASES = {case.name: case for case in (*collect("CASES"), *DECODERS, *HEADED)}

EXPERTS = ("gate_up_proj", "down_proj")
LOADED = {
    "gpt2": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"]},
    "gpt2-all": {"r": 3, "lora_alpha": 5, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "gpt2-untied": {"r": 2, "lora_alpha": 2, "target_modules": ["lm_head", "mlp.c_fc"]},
    "gpt2-cross-attention": {"r": 4, "lora_alpha": 4, "target_modules": ["q_attn", "c_attn"]},
    "gpt2-rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "use_rslora": True},
    "gpt2-dora": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc"], "use_dora": True},
    "llama-dora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "use_dora": True, "use_rslora": True},
    "gpt2-some-layers": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc"], "layers_to_transform": [1]},
    "gpt2-patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["c_attn", "c_fc"],
        "rank_pattern": {"h.1.attn.c_attn": 6, "c_fc": 2},
        "alpha_pattern": {r"h\.0.*": 3},
    },
    "llama-embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "q_proj"], "lora_dropout": 0.1},
    "gpt2-embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["wte"]},  # tied to the head
    **{
        name: {"r": 3, "lora_alpha": 6, "target_modules": [], "target_parameters": [f"experts.{end}" for end in ends]}
        for name, ends in {"gpt-oss": EXPERTS, "granite-moe": EXPERTS[:1], "qwen3-moe": EXPERTS[1:]}.items()
    },
    "gptj-left-padded": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "fc_out"]},
    "opt": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "t5-v1.1": {"r": 4, "lora_alpha": 8, "target_modules": ["q", "v", "wi_0", "lm_head"]},
    "clip": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "text_projection"]},
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "mistral-embeddings": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},  # names without their first part
    "modernbert": {"r": 4, "lora_alpha": 8, "target_modules": ["Wqkv", "Wo"]},
    "modernbert-mlm": {"r": 4, "lora_alpha": 8, "target_modules": ["Wi", "Wqkv"], "layers_to_transform": [0, 2]},
    "vit-classes": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "fc2", "classifier"]},
    "gpt2-norms": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "modules_to_save": ["ln_f", "ln_1"]},
    "gpt2-untied-head": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "modules_to_save": ["lm_head", "wte"]},
    "llama-norms": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
    "vit-classes-head": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["classifier"]},
}
# Globs of layers, each with the rank and alpha of its adapters.
SAVED = {
    "gpt2": {("*.query", "*.value"): (4, 8)},
    "gpt2-all": {"*": (2, 6)},
    "gpt2-untied": {"head": (3, 4), "*.up": (4, 8), "*.key": (2, 1), "*.value": (5, 1)},
    "gpt2-cross-attention": {"*.cross_attention.*": (4, 4)},
    "gptj-left-padded": {("*.query", "*.value"): (4, 8), "*.down": (2, 8)},
    "opt": {"*": (4, 8)},
    "t5-v1.1": {("*.query", "head"): (4, 8), "*.gate": (3, 8)},
    "bart": {"decoder.*.query": (4, 8)},
    "clip": {"*": (4, 8)},
    "llama": {("*.query", "*.value"): (4, 8), "*.down": (2, 3), "embedding": (3, 6)},
    "mistral-embeddings": {("*.query", "*.down"): (3, 6)},
    "qwen3-moe": {"*.query": (3, 6), "*.experts.*": (2, 3)},
    "gpt-oss": {("*.experts.up", "*.experts.down"): (2, 9)},
    "vit-classes": {"*": (2, 4)},
    # Its first layer, without experts, is another stack than the others.
    "deepseek-v3": {"first.*.output": (2, 3), "stack.*.output": (2, 8), "first.*.query": (3, 4), "stack.*.key": (1, 4)},
    "llava": {("*.query", "projector_in", "text.head"): (2, 4), "*.up": (3, 4)},
    "modernbert-mlm": {("*.query", "*.up"): (3, 6), "*.down": (2, 8)},
}


def case_of(name):
    return CASES.get(name) or CASES.get(name.rpartition("-")[0]) or CASES[name.split("-")[0]]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that returns the folder of a case, which is written once."""
    made = {}

    def get(case):
        if case.name not in made:
            made[case.name] = tmp_path_factory.mktemp(case.name)
            torch_folder(case, made[case.name])
        return made[case.name]

    return get


def torch_model(case, folder):
    return type(case.make()).from_pretrained(folder).eval()


def adapted_torch(module, keys):
    """Returns the module with PEFT's adapters, with random values in all entries, and in modules that are trained whole."""
    import peft
    import torch

    module = peft.get_peft_model(module, peft.LoraConfig(**keys)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "magnitude" in name:
                parameter *= 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
            elif "lora_" in name:
                parameter.normal_(0, SIZE * parameter.shape[1] ** -0.5, generator=generator)
            if "modules_to_save" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module


def adapted(model, adapters):
    """Returns the model with our adapters, with random values in all entries."""
    for i, (where, (rank, alpha)) in enumerate(adapters.items()):
        globs = {"embeddings" if where == "embedding" else "where": where}
        model = lora.add(model, rank=rank, alpha=alpha, **globs, key=jax.random.key(i))
    rng = np.random.default_rng(0)
    chosen = lora.trainable(model)

    def fill(is_adapter, leaf):
        return jnp.asarray(SIZE * rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype) if is_adapter else leaf

    return jax.tree.map(fill, chosen, model)


def torch_outputs(case, module):
    import torch

    with torch.no_grad():
        return case.run(module, case.inputs).numpy()


@pytest.mark.parametrize("name", LOADED)
def test_loads_what_peft_saved(name, folder_of, tmp_path):
    case = case_of(name)
    module = adapted_torch(torch_model(case, folder_of(case)), LOADED[name])
    module.save_pretrained(tmp_path / "adapter")
    base, _ = from_pretrained(folder_of(case))
    model = lora.load_adapter(base, tmp_path / "adapter")
    found, expected = outputs(case, model), torch_outputs(case, module)
    assert np.abs(expected - outputs(case, base)).max() > 0.1
    assert_equal(case, found, expected, atol=1e-5)
    # The loaded adapters are saved again as a folder that computes the same.
    lora.save_adapter(model, tmp_path / "again")
    assert_equal(case, torch_outputs(case, peft_model(case, folder_of(case), tmp_path / "again")), expected, atol=1e-5)


def peft_model(case, base, folder):
    import peft

    module = torch_model(case, base)
    return peft.PeftModel.from_pretrained(module, folder).eval()


@pytest.mark.parametrize("name", SAVED)
def test_peft_loads_what_was_saved(name, folder_of, tmp_path, recwarn):
    case = case_of(name)
    base, _ = from_pretrained(folder_of(case))
    model = adapted(base, SAVED[name])
    lora.save_adapter(model, tmp_path, base="somewhere/base")
    recwarn.clear()
    module = peft_model(case, folder_of(case), tmp_path)
    said = [str(w.message) for w in recwarn]
    assert not [text for text in said if "missing" in text or "unexpected" in text.lower()], said
    n_tensors = sum("lora_" in key for key in module.state_dict())
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "somewhere/base"
    from safetensors import safe_open

    with safe_open(tmp_path / "adapter_model.safetensors", "np") as file:
        assert len(list(file.keys())) == n_tensors
    expected = torch_outputs(case, module)
    assert np.abs(expected - outputs(case, base)).max() > 0.1
    assert_equal(case, outputs(case, model), expected, atol=1e-5)


def test_peft_loads_a_trained_embedding_that_is_tied_to_the_head(folder_of, tmp_path):
    case = CASES["gpt2"]
    base, _ = from_pretrained(folder_of(case))
    model = adapted(base, SAVED["gpt2"])
    noise = np.random.default_rng(2).normal(size=base.embedding.weight.shape).astype(np.float32)
    trainer = redeqx.Trainer(
        redeqx.Deployer(verbose=False), model=model, trainable=lora.trainable(model, also="embedding.weight"),
        optimizer=optax.sgd(0.1), collate_fn=np.stack,
        loss_fn=lambda model, batch, key: (model.embedding.weight * noise).sum() + 0 * batch.sum(),
    )  # fmt: skip
    trainer.update([np.zeros(1, np.float32)] * len(jax.devices()))
    lora.save_adapter(trainer.model, tmp_path)
    expected = torch_outputs(case, peft_model(case, folder_of(case), tmp_path))
    assert np.abs(expected - outputs(case, model)).max() > 0.1
    assert_equal(case, outputs(case, trainer.model), expected, atol=1e-5)
    assert_equal(case, outputs(case, lora.load_adapter(base, tmp_path)), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2-untied", "llama"])
def test_gradients(name, folder_of, tmp_path):
    """Gradients of a loss with a different weight per output, for `A` and `B` of layers that are single modules in PEFT."""
    case = case_of(name)
    keys = {**LOADED[name], "target_modules": ["c_fc", "lm_head"] if name == "gpt2-untied" else "all-linear"}
    module = adapted_torch(torch_model(case, folder_of(case)), keys)
    module.save_pretrained(tmp_path / "adapter")
    base, _ = from_pretrained(folder_of(case))
    model = eqx.nn.inference_mode(lora.load_adapter(base, tmp_path / "adapter"))
    import torch

    expected = case.run(module, case.inputs)
    weights = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    (expected * torch.tensor(weights)).sum().backward()
    with torch.no_grad():
        for parameter_name, parameter in module.named_parameters():
            if "lora_" in parameter_name:
                parameter.copy_(parameter.grad)
    # Saved as if they were weights, since only files have common names.
    module.save_pretrained(tmp_path / "gradients")
    theirs = lora.load_adapter(base, tmp_path / "gradients")

    trained, frozen = eqx.partition(model, lora.trainable(model))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(trained):
        return (call_rows(case, eqx.combine(trained, frozen), case.inputs) * weights).sum()

    ours = {path: leaf for path, leaf in named_leaves(gradient(trained)).items() if leaf is not None}
    assert len(ours) >= 4
    for path, leaf in ours.items():
        wanted = np.asarray(named_leaves(theirs)[path])
        assert np.linalg.norm(wanted) > 1e-3
        assert np.linalg.norm(leaf - wanted) < 1e-3 * np.linalg.norm(wanted), path
