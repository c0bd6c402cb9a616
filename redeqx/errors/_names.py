"""Names of arguments: a call with one that a function does not take raises an error with the nearest that it takes."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from .._tree import nearest

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_names(
    signature: inspect.Signature,
    of: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    redco: Mapping[str, str] | None = None,
) -> None:
    """Raises TypeError for arguments that a signature does not take.

    `of` is the name of the class or function, `args` excludes `self`, and `redco` maps Redco's names to what replaces them.
    """
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    names = {p.name: p for p in parameters if p.kind not in _VARIADIC}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for name in (name for name in kwargs if name not in names and not takes_any):
        expected = f"`{of}({name}=)`: expected an argument of redeqx, got "
        if redco and name in redco:
            raise TypeError(f"{expected}one of Redco. {redco[name]}")
        raise TypeError(f"{expected}an unknown one.{_other(name, names) or nearest(name, names) or _listed(names)}")
    positional = [name for name, p in names.items() if p.kind is not p.KEYWORD_ONLY]
    if len(args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        allowed = ", ".join(f"`{name}`" for name in positional)
        rule = f"only {allowed} without a name" if positional else "each argument with its name"
        found = f"{len(args)} such arguments" if positional else f"{len(args)} without one"
        by_name = [f"{name}=..." for name in list(names)[len(positional) : len(args)]]
        advice = f"Name the others: `{of}({', '.join([*positional, *by_name])})`" if by_name else "Leave the others out"
        if not positional:
            advice = f"Name them: `{of}({', '.join(by_name) or 'name=...'})`"
        raise TypeError(f"`{of}`: expected {rule}, got {found}. {advice}.")
    given = {*positional[: len(args)], *kwargs}
    missing = [name for name, p in names.items() if p.default is p.empty and name not in given]
    if missing:
        listed = ", ".join(f"`{name}`" for name in missing)
        raise TypeError(f"`{of}({missing[0]}=)`: expected this argument, got none. Pass {listed}.")


def _listed(names: Mapping[str, Any]) -> str:
    return f" It takes {', '.join(f'`{name}`' for name in names)}." if names else " It takes none."


def _other(name: str, names: Mapping[str, Any]) -> str:
    """Returns a sentence with the argument that has this name in other libraries, if the function takes it."""
    found = [other for other in _OTHERS.get(name, ()) if other in names]
    if not found:
        return ""
    return f" Did you mean {' or '.join(f'`{other}`' for other in found)}{_WITH.get(name, '')}?"


# Other libraries' names of arguments.
_OTHERS = {
    name: of.split()
    for names, of in {
        "epochs num_epochs max_epochs num_train_epochs": "n_epochs",
        "steps num_steps n_steps": "max_steps",
        "per_device_train_batch_size train_batch_size": "per_device_batch_size batch_size",
        "bs": "batch_size",
        "validation_data val_examples eval_dataset": "eval_examples",
        "train_dataset": "train_examples",
        "dataset data": "examples",
        "metrics compute_metrics metric_fn": "eval_metric_fn",
        "gradient_accumulation_steps accumulate_steps": "accumulate_grad_batches",
        "seed": "jax_seed",
        "opt optim": "optimizer",
        "output_dir save_dir ckpt_dir": "workdir",
        "save_directory path": "folder",
        "lr": "learning_rate",
        "schedule": "schedule_type",
        "momentum": "beta",
        "r": "rank",
        "lora_alpha": "alpha",
        "target_modules": "where",
        "modules_to_save": "also",
        "sample": "do_sample",
        "n_beams": "num_beams",
        "n_return": "num_return_sequences",
        "max_length max_tokens": "max_new_tokens",
        "attention_mask": "mask",
        "input_ids prompts": "inputs",
        "num_proc num_workers n_workers": "workers",
        "block_size seq_len max_seq_length context_length": "length",
        "monitor": "metric",
        "rules specs": "overrides",
    }.items()
    for name in names.split()
}
_WITH: dict[str, str] = dict.fromkeys(("metrics", "compute_metrics", "metric_fn"), ", with an `eval_predictor`")
