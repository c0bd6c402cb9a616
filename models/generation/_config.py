"""Reads `generation_config.json`: the defaults of `generate`, and the keys that it refuses.

This module defines which keys are arguments of `generate`, which keys never change a token, and which values of the other
keys have no effect. Special tokens are fields of a family's config.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from redeqx._tree import nearest
from redeqx.errors import brief

from .._kinds import COUNT, TOKEN, Kind
from ._options import DEFAULTS, SAMPLING, Options, hashable

GENERATION = "generation_config.json"

# Keys that are arguments of `generate`. `early_stopping` and the forced tokens are others; they have several types.
_ARGUMENTS: dict[str, Kind] = {option.name: option.metadata["kind"] for option in fields(Options) if option.metadata}
# Values that mean None, in place of a number.
_NONE = {"top_k": 0, "num_return_sequences": 1, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
# These lengths include the prompt. A key of `_ARGUMENTS` takes precedence over them.
_LENGTHS = {"max_length": "max_new_tokens", "min_length": "min_new_tokens"}
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")

# For each other key, the values that change no token. null never changes one.
_SAMPLING: dict[str, tuple[Any, ...]] = {  # no effect without sampling
    "top_h": ()
}
_BEAMS: dict[str, tuple[Any, ...]] = {"num_beam_groups": (1,), "diversity_penalty": (0,)}  # no effect without a beam search
_GREEDY: dict[str, tuple[Any, ...]] = {"penalty_alpha": (0,), "dola_layers": ()}  # no effect with sampling or beams
_ALWAYS: dict[str, tuple[Any, ...]] = {
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "sequence_bias": ([], {}),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "constraints": ([],),
    "force_words_ids": ([],),
    "max_time": (),
    "stop_strings": ([],),
    "assistant_ensemble_weight": (),
    "cache_implementation": ("dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid"),
}
# Caches, compilation, additional outputs and verified drafts: these keys do not change the tokens.
_IRRELEVANT = frozenset(
    ("use_cache", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size", "compile_config", "disable_compile",
     "continuous_batching_config", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
     "return_dict_in_generate", "is_assistant", "num_assistant_tokens", "use_mtp", "num_assistant_tokens_schedule",
     "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
     "speculation_type", "prompt_lookup_num_tokens", "max_matching_ngram_size", "transformers_version",
     "_from_model_config", "_commit_hash", "_original_object_hash")
)  # fmt: skip


@dataclass(frozen=True)
class Generation:
    """A folder's options for generation: the defaults of `generate`, and keys that it does not implement.

    **Arguments:**

    - `keys`: the keys of `generation_config.json`, in its spelling. null counts as absent.
    - `path`: the path of the file, for error messages.

    Raises TypeError or ValueError if a value for an argument of `generate` has the wrong type or is out of range.
    """

    keys: Mapping[str, Any] = field(default_factory=dict, hash=False)
    path: Any = field(default=GENERATION, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in self.keys.items():
            if value is None:
                continue
            if name in _ARGUMENTS:
                _ARGUMENTS[name].check(self.path, name, value)
            elif name in _LENGTHS:
                COUNT.check(self.path, name, value)
            elif name in _FORCED:
                TOKEN.check(self.path, name, value)
            elif name == "early_stopping" and value not in (True, False, "never"):
                raise ValueError(
                    f"`{self.path}`: `early_stopping`: expected true, false or 'never', got {brief(value)}. Correct it."
                )

    @staticmethod
    def known() -> frozenset[str]:
        """Returns the generation keys that an old `config.json` contains in addition to the model's own keys."""
        names = {*_ARGUMENTS, *_LENGTHS, "early_stopping", *_SAMPLING, *_BEAMS, *_GREEDY, *_ALWAYS}
        return frozenset({*names, *_FORCED, "output_scores", "return_dict_in_generate"})

    def complete(
        self, given: Mapping[str, Any], *, n_given: int, ignore: Collection[str] = ()
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Fills in arguments of `generate` that are None, with the folder's values or else the built-in defaults.

        Returns the arguments, and the folder's key for each argument that comes from the folder. The folder's sampling
        options are dropped if tokens are not sampled. Its minimum number of tokens is limited to the maximum.

        **Arguments:**

        - `given`: the caller's arguments.
        - `n_given`: the number of tokens before the first new one.
        - `ignore`: keys that are treated as absent, although they are not implemented.

        Raises ValueError for a key that is not implemented and would change the generated tokens.
        """
        present = {name: value for name, value in self.keys.items() if value is not None and name not in ignore}
        folder: dict[str, tuple[str, Any]] = {}
        for name, argument in _LENGTHS.items():
            if name in present:
                folder[argument] = name, present[name] - n_given
        for name, kind in _ARGUMENTS.items():
            if name in present and (name not in _NONE or present[name] != _NONE[name]):
                folder[name] = name, hashable(kind.type(present[name]))
        for name in ("early_stopping", *_FORCED):
            if name in present:
                folder[name] = name, hashable(present[name])
        sample = folder.get("do_sample", ("", False))[1] if given["do_sample"] is None else given["do_sample"]
        if not sample:
            folder = {name: at for name, at in folder.items() if name not in SAMPLING}
        options: dict[str, Any] = {
            name: DEFAULTS[name] if value is None else hashable(value) for name, value in given.items()
        }
        keys = {argument: key for argument, (key, _) in folder.items() if given[argument] is None}
        options |= {argument: folder[argument][1] for argument in keys}
        if "min_new_tokens" in keys and options["max_new_tokens"] is not None:
            options["min_new_tokens"] = max(0, min(options["min_new_tokens"], options["max_new_tokens"]))
        self._check(sample=sample, num_beams=options["num_beams"], ignore=ignore)
        return options, keys

    def with_source(self, error: ValueError, keys: Mapping[str, str]) -> ValueError:
        """Adds the file and the key to an error of `generate` about an argument that came from the folder."""
        text = str(error)
        named = [argument for argument in re.findall(r"`(\w+)[`=]", text) if argument in keys]
        if not named and text.startswith("`key`") and "do_sample" in keys:
            named = ["do_sample"]
        if not named:
            return error
        where = ", ".join(f"`{argument}` is `{keys[argument]}` of `{self.path}`" for argument in dict.fromkeys(named))
        return ValueError(f"{text} Here {where}.")

    def _check(self, *, sample: bool, num_beams: int, ignore: Collection[str]) -> None:
        """Raises ValueError for a key that is not implemented and would change the tokens of this kind of search.

        **Arguments:**

        - `ignore`: keys that are treated as absent.
        """
        neutral = dict(_ALWAYS)
        neutral |= _SAMPLING if sample else {}
        neutral |= _BEAMS if num_beams > 1 else {}
        neutral |= _GREEDY if not sample and num_beams == 1 else {}
        known = {*self.known(), *_IRRELEVANT, *_FORCED}
        for name in ignore:
            if name not in known and name not in self.keys:
                raise ValueError(f"`ignore`: expected keys of `{GENERATION}`, got {name!r}.{nearest(name, known)}")
        wrong = []
        for name, value in self.keys.items():
            is_neutral = value is None or any(
                (type(value) is not bool and value == one) or value is one for one in neutral.get(name, ())
            )
            if name in ignore or is_neutral or (name in known and name not in neutral) or name.endswith("_token_id"):
                continue
            wrong.append(name)
        if wrong:
            name, value = wrong[0], self.keys[wrong[0]]
            hint = "" if name in known else nearest(name, known)
            more = f" (and {', '.join(f'`{other}`' for other in wrong[1:])})" if wrong[1:] else ""
            raise ValueError(
                f"`{self.path}`: `{name}`{more}: expected none, since `generate` does not implement it, got "
                f"{brief(value)}.{hint} Pass `ignore={tuple(wrong)!r}` to generate without it, or remove it from the file."
            )
