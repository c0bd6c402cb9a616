"""Names of arguments that a function does not take: the error for them, and where redeqx has what they are for.

What another of the public functions takes is read from its signature. Names of other libraries are in a table, as the most
similar argument may mean something else: `tensor` is nearer to `fsdp` than to `model`.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._tree import nearest

# In the order in which a name is looked up.
_MAIN = ("Deployer", "Trainer", "fit", "get_default_predictor")
_OF_PREDICTOR = ("predict", "get_default_predictor", "Deployer")  # what a Predictor has a part in
_SIGNATURES: dict[str, inspect.Signature] = {}

_DATA = "(data|dataset|set|ds|dataloader|loader)"
_EXAMPLES = rf"((train|training|eval|evaluation|val|valid|validation|test)_)?({_DATA}|examples)"
# Names of PyTorch, Hugging Face, Lightning, Levanter and MaxText, and the next step.
_OTHERS = {
    r"tp|tp_size|n_tp_shards|\w*tensor_\w+|\w*model_parallel\w*": "Pass `Deployer(n_model_shards=)`.",
    r"\w*(fsdp|zero)\w*": "Pass `Deployer(n_fsdp_shards=)`.",
    r"(sp|cp)(_size)?|\w*(context|seq|sequence)_(parallel|shards)\w*": "Pass `Deployer(n_sequence_shards=)`.",
    r"(dp|ddp)(_size)?|\w*data_(parallel|shards)\w*|(n_|num_)?(devices|gpus|nodes)|mesh\w*|strategy": (
        "Leave it out: all devices are used. `n_model_shards`, `n_fsdp_shards` and `n_sequence_shards` of `Deployer` say "
        "how many share a layer, and the others divide the batch."
    ),
    r"bf16|fp16|fp8|\w*precision|(?!save)\w*dtype": "Pass `Trainer(compute='bfloat16')`.",
    r"\w*accumulation\w*": "Pass `Trainer(accumulate_grad_batches=)`.",
    r"\w*gradient_checkpointing|remat\w*": "Pass `Trainer(compute=redeqx.Compute(remat='full'))`.",
    r"lr|learning_rate|weight_decay": "Pass it to the optimizer: `Trainer(optimizer=optax.adamw(learning_rate))`.",
    r"\w*clip\w*|max_grad_norm": (
        "Put it into the optimizer: `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate))`."
    ),
    rf"(train|training)_{_DATA}|{_DATA}": "Pass `fit(train_examples)`.",
    rf"(eval|evaluation|val|valid|validation|test)_{_DATA}": "Pass `fit(eval_examples=)`.",
    r"per_device_eval_batch_size": "Pass `fit(eval_per_device_batch_size=)`.",
    r"(eval|evaluation)_(steps|every|interval|freq)": "Pass `fit(eval_every_n_steps=)`.",
    r"(save|ckpt|checkpoint)_(steps|every|interval|freq)": "Pass `fit(save_every_n_steps=)`.",
    r"save_total_limit": "Pass `fit(keep_last=)`.",
    r"compute_metrics|metrics|metric_fn": "Pass `fit(eval_predictor=, eval_metric_fn=)`.",
    r"\w*collator": "Pass `Trainer(collate_fn=)`.",
    r"\w*_dir|\w*_path": "Pass `Deployer(workdir=)`.",
    r"resume_\w+": "Leave it out: `fit` continues the run of its workdir. `load_ckpt` loads another checkpoint.",
    r"load_best\w*|metric_for_best\w*": (
        "Pass `fit(save_argmin_ckpt_by_metrics=['loss'])`, and call `load_ckpt('argmin_loss')` after it."
    ),
    r"early_stopping\w*": "Pass `fit(callbacks=[redeqx.EarlyStopping('loss', patience=3)])`.",
    r"\w*(wandb|tensorboard|mlflow)\w*|report_to|tracker": "Pass its name: `Deployer(loggers=['wandb'])`.",
    r"logging_\w+|log_every\w*": "Leave it out: every step is recorded in the `metrics.jsonl` of the workdir.",
    r"shuffle\w*": "Leave it out: `fit` shuffles each epoch, and `train` keeps the order.",
    r"\w*seed": "Pass `Deployer(jax_seed=)`.",
    r"has_aux": "Leave it out: `loss_fn` returns its metrics in a `redeqx.Loss(total, weight, metrics)`.",
}


def note_signature(of: str, signature: inspect.Signature) -> None:
    """Notes the signature of a public function, so that errors of others can name it."""
    if of in (*_MAIN, *_OF_PREDICTOR):
        _SIGNATURES[of] = signature


def check_names(signature: inspect.Signature, of: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments that a signature does not take; `of` is the name of the function."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
        bare = inspect.Signature([p for p in parameters if p.name not in ("self", "cls")])
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        unknown = [name for name in kwargs if name not in signature.parameters and not takes_any]
        got = f"; {error}."
        if unknown:
            got = f", got an unknown one: `{unknown[0]}`.{_next_step(unknown[0], signature, of)}"
        raise TypeError(f"`{of}`: expected the arguments `{bare}`{got}") from None


def _next_step(name: str, signature: inspect.Signature, of: str) -> str:
    """Returns what to write in place of an unknown argument, to end an error; empty if nothing is known."""
    if of in (*_MAIN, "Predictor", "train", "update", "eval_loss", "predict"):
        if "examples" in signature.parameters and re.fullmatch(_EXAMPLES, name):
            return " Pass it as `examples`."
        owners = _OF_PREDICTOR if of in (*_OF_PREDICTOR[:2], "Predictor") else _MAIN
        owner = next((main for main in owners if name in _SIGNATURES[main].parameters), None)
        if owner is not None:
            return f" It is an argument of `{owner}`."
        if (found := next((advice for names, advice in _OTHERS.items() if re.fullmatch(names, name)), None)) is not None:
            return f" {found}"
    return nearest(name, signature.parameters)
