"""Compares names of keys, those that are read, and generation configs with `transformers`; needs the `parity` extra."""

import inspect
import json
import re

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from redeqx.models import from_pretrained, generate, save_pretrained
from redeqx.models._families import MODELS
from redeqx.models.hf import ConfigReader
from tests.models.families._case import collect, outputs, torch_folder
from tests.models.families._decoders import CASES as DECODERS, HEADED
from tests.models.hf.test_config import ALIASES

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
CASES = {case.name: case for case in collect("CASES")}


def edit(path, change):
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def test_the_alternative_names_are_those_of_transformers():
    import transformers

    of_ours = ("GPT2", "GPTJ", "OPT", "Llama", "Mistral", "Qwen2", "Qwen3", "T5", "MT5", "Bart", "Bert", "ViT", "CLIP")
    for name in (
        *of_ours,
        "Roberta",
        "XLMRoberta",
        "DistilBert",
        "ModernBert",
        "CLIPText",
        "CLIPVision",
        "VisionEncoderDecoder",
    ):
        theirs = getattr(transformers, f"{name}Config").attribute_map
        assert theirs == ALIASES.get(name.lower().replace("mt5", "t5"), {}), name


@pytest.mark.parametrize("family", ALIASES)
def test_outputs_of_a_folder_with_alternative_names(family, tmp_path):
    import torch

    case = CASES[family]
    torch_folder(case, tmp_path)

    def rename(fields):
        for alias, name in ALIASES[family].items():
            fields[alias] = fields.pop(name)

    edit(tmp_path / "config.json", rename)
    module = type(case.make()).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = case.run(module, case.inputs).numpy()
    np.testing.assert_allclose(outputs(case, from_pretrained(tmp_path)[0]), expected, rtol=0, atol=1e-4)


SAID = [
    {"max_new_tokens": 6, "eos_token_id": [2, 5, 17, 33], "pad_token_id": 0},
    {"max_length": 14, "min_length": 12, "eos_token_id": [2, 5, 17, 33], "pad_token_id": 0},
    {
        "max_length": 14,
        "num_beams": 3,
        "length_penalty": 2.0,
        "early_stopping": True,
        "eos_token_id": [2, 5],
        "pad_token_id": 0,
    },
    {"max_new_tokens": 6, "forced_eos_token_id": 7, "forced_bos_token_id": 9, "eos_token_id": [7], "pad_token_id": 0},
    {  # bart-large-cnn's, and Qwen2.5-Instruct's penalty
        "max_length": 14,
        "min_length": 12,
        "num_beams": 4,
        "length_penalty": 2.0,
        "early_stopping": True,
        "no_repeat_ngram_size": 3,
        "repetition_penalty": 1.1,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "eos_token_id": [2],
        "pad_token_id": 1,
    },
    {"max_new_tokens": 5, "temperature": 0.3, "top_k": 2, "do_sample": False, "eos_token_id": [7], "pad_token_id": 0},
]


SAID_IN = [  # each of them in both files, each family with all of them
    pytest.param(name, said, ("generation_config.json", "config.json")[(i + j) % 2], id=f"{name}-{kind}")
    for i, name in enumerate(("gpt2", "t5", "bart"))
    for j, (kind, said) in enumerate(
        zip(("new", "lengths", "beams", "forced", "penalties", "no-sampling"), SAID, strict=True)
    )
]


@pytest.mark.parametrize(("name", "said", "where"), SAID_IN)
def test_generates_with_the_options_of_the_folder(name, said, where, tmp_path):
    import torch

    case = CASES[name]
    torch_folder(case, tmp_path)
    if name == "bart":  # it has twelve positions
        said = {key: min(value, 12) if key.endswith("length") else value for key, value in said.items()}
    if where == "config.json":
        (tmp_path / "generation_config.json").unlink()
        edit(tmp_path / where, lambda fields: fields.update(said))
    else:
        start = {} if name == "gpt2" else {"decoder_start_token_id": 2}
        (tmp_path / where).write_text(json.dumps({**said, **start}))
    model, config = from_pretrained(tmp_path)
    save_pretrained(model, config, tmp_path / "again")
    ids = torch.tensor(case.inputs["ids"])
    found = np.asarray(generate(model, case.inputs["ids"]))
    for folder in (tmp_path, tmp_path / "again"):
        module = type(case.make()).from_pretrained(folder).eval()
        tokens = module.generate(ids, attention_mask=torch.ones_like(ids)).numpy()
        tokens = tokens[:, 1 if module.config.is_encoder_decoder else ids.shape[1] :]
        tokens = np.pad(tokens, ((0, 0), (0, found.shape[1] - tokens.shape[1])), constant_values=said["pad_token_id"])
        for row in tokens:  # tokens after the end of a text are undefined
            (ends,) = np.nonzero(np.isin(row, said["eos_token_id"]))
            row[ends[0] + 1 if len(ends) else len(row) :] = said["pad_token_id"]
        np.testing.assert_array_equal(found, tokens, err_msg=str(folder))


def test_ends_and_padding_of_the_model_are_not_those_of_generation(tmp_path):
    """Only `generation_config.json` says which tokens end a text, and what follows them, if it exists."""
    import torch

    case = CASES["gpt2"]
    torch_folder(case, tmp_path)
    ids = torch.tensor(case.inputs["ids"])
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"max_new_tokens": 4}))
    first = int(np.asarray(generate(from_pretrained(tmp_path)[0], case.inputs["ids"]))[0, 0])
    edit(tmp_path / "config.json", lambda fields: fields.update(eos_token_id=first, pad_token_id=1))
    for said in ({}, {"eos_token_id": first}):
        path.write_text(json.dumps({"max_new_tokens": 4, **said}))
        module = type(case.make()).from_pretrained(tmp_path).eval()
        tokens = module.generate(ids, attention_mask=torch.ones_like(ids)).numpy()[:, ids.shape[1] :]
        tokens = np.pad(tokens, ((0, 0), (0, 4 - tokens.shape[1])), constant_values=first)
        np.testing.assert_array_equal(generate(from_pretrained(tmp_path)[0], case.inputs["ids"]), tokens)


def test_the_defaults_of_absent_keys_are_those_of_transformers():
    """For each model type, of a `config.json` that has no other key."""
    import transformers

    different = set()
    for cls in MODELS:
        for name in cls.model_types:
            if name in ("llava", "mistral3", "vision-encoder-decoder", "deberta-v2", "lfm2_moe"):  # some are required
                continue
            ours = cls.config_of(name).from_hf(ConfigReader({"model_type": name})).to_hf()
            if ours.get("model_type") != name:  # one of diffusers, or a part of a larger model
                continue
            theirs = transformers.AutoConfig.for_model(name).to_dict()
            known = [key for key in ours if theirs.get(key) is not None and not isinstance(ours[key], dict)]
            different |= {(name, key) for key in known if ours[key] != theirs[key]}
            rope = theirs.get("rope_parameters") or {}
            wanted = {key: rope[key] for key in (ours.get("rope_parameters") or {}) if key in rope}
            different |= {(name, key) for key, value in wanted.items() if ours["rope_parameters"][key] != value}
    # Layers that predict further tokens, which are not read; and other spellings of the same.
    assert different == {
        ("deepseek_v3", "num_nextn_predict_layers"),
        ("glm4_moe", "num_nextn_predict_layers"),
        ("falcon", "num_kv_heads"),
        ("falcon", "ffn_hidden_size"),
        ("gpt_neo", "attention_types"),
        ("hyperclovax", "attention_multiplier"),  # of a head's size, as `None` is
        ("lfm2", "intermediate_size"),  # as adjusted
        ("lfm2", "block_auto_adjust_ff_dim"),
        ("gemma4_text", "full_attention"),  # a rope with its factor, 1
        ("gemma4_unified_text", "full_attention"),
        ("lfm3", "full_attention"),
    }


# Keys that transformers' code reads and that change no output here: of training losses, initial weights, precision, chunks,
# other heads, and of what a call returns; and by type, those that follow from other keys or count only with another one.
HARMLESS = """
    apply_layernorm attention_softmax_in_fp32 chunk_size chunk_size_feed_forward classifier_dropout classifier_proj_size
    decoder_layerdrop deterministic_flash_attn embedding_initializer_range enable_moe_fp32_combine encoder_layerdrop
    encoder_stride id2label initializer_cutoff_factor initializer_factor input_jitter_noise is_decoder
    is_encoder_decoder mamba_chunk_size mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length
    mask_time_min_masks mask_time_prob num_logits_to_keep output_attentions output_hidden_states output_router_logits
    pretraining_tp problem_type qa_dropout reorder_and_upcast_attn rescale_prenorm_residual reshape_hidden_states
    residual_in_fp32 return_dict router_aux_loss_coef scale_attention_softmax_in_fp32 sinusoidal_pos_embds
    slow_but_exact sparse_pred_ignore_index sparse_prediction summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj use_associative_scan use_cache use_mamba_kernels use_mambapy
    use_weighted_layer_sum z_loss_coefficient
"""
HARMLESS_OF = {
    "axk1": {"head_dim"},
    "clip_text_model": {"projection_dim"},
    "clip_vision_model": {"projection_dim"},
    "cohere2": {"head_dim"},
    "deberta-v2": {"pooler_hidden_size"},
    "deepseek_v2": {"head_dim"},
    "deepseek_v3": {"head_dim"},
    "exaone4": {"sliding_window_pattern"},
    "exaone_moe": {"sliding_window_pattern"},
    "falcon": {"multi_query"},
    "mamba2": {"time_step_rank"},
    "minicpm3": {"head_dim"},
    "phi3": {"original_max_position_embeddings"},
    "qwen2_moe": {"sliding_window"},
    "qwen3_moe": {"sliding_window"},
    "qwen3_5_moe_text": {"intermediate_size"},
    "sarvam_mla": {"head_dim"},
    "smollm3": {"sliding_window"},
    "vision-encoder-decoder": {"tie_word_embeddings"},
    "youtu": {"head_dim"},
}


def test_each_key_that_transformers_reads_is_read():
    """Or it is known to change nothing: a key that a family keeps unread would make another model without an error."""
    unread = {}
    for case in (*DECODERS, *HEADED, *collect("CASES")):
        module = case.make()
        if not hasattr(module.config, "to_dict"):
            continue  # of diffusers
        fields = {**module.config.to_dict(), "architectures": [type(module).__name__]}
        kind = fields["model_type"]
        cls = next(
            cls for cls in MODELS if kind in cls.model_types and fields["architectures"][0] in cls.architectures_of(kind)
        )
        config = cls.config_of(kind).from_hf(ConfigReader(fields))
        source = inspect.getsource(inspect.getmodule(type(module)))
        read = re.findall(r"""config\.(\w+)|getattr\((?:self\.)?config, ["'](\w+)""", source)
        read = {name for names in read for name in names if name}
        if missed := read & config.extra.keys() - set(HARMLESS.split()) - HARMLESS_OF.get(kind, set()):
            unread[case.name] = missed
    assert not unread
