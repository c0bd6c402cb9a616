"""Evaluation by EleutherAI's lm-evaluation-harness: the interface of its `LM` on a decoder, a Predictor and `generate`.

Source: `lm_eval.api.model.LM` of https://github.com/EleutherAI/lm-evaluation-harness (0.4). The harness is not a dependency.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import einops
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from redeqx import Deployer, Predictor
from redeqx.errors import check_count, check_type, warn, wrong

from .generation import generate

_CHUNK = 128  # tokens whose logits are computed at once


class HarnessLM:
    """The requests that the harness makes of a language model. `harness_lm` returns one that it takes.

    A request is an object with `args`. Each method returns one result for each request, in their order.

    **Arguments:**

    - `deployer`: the devices.
    - `model`: a decoder, with `hidden`, `logits`, `init_cache` and `decode`.
    - `tokenizer`: of `tokenizers`; special tokens are not added.
    - `batch_size`: texts computed at once, over all devices.
    - `max_length`: the most tokens of a text; by default the positions of the model. What is longer loses its start.
    - `chat_template`: maps messages, and whether a reply begins at the end, to a text; for `--apply_chat_template`.
    """

    def __init__(
        self,
        deployer: Deployer,
        model: Any,
        tokenizer: Any,
        *,
        batch_size: int = 32,
        max_length: int | None = None,
        chat_template: Callable[[list[dict[str, str]], bool], str] | None = None,
    ):
        super().__init__()  # of the harness
        check_type(deployer, Deployer, "deployer")
        check_count(batch_size, "batch_size")
        config, self._deployer, self._model, self._tokenizer = model.config, deployer, model, tokenizer
        if not getattr(config, "is_causal", True):
            raise wrong("model", "tokens that attend to those before them", "`is_causal`=False", "Pass another.")
        self._batch_size, self._template = batch_size, chat_template
        self.max_length = min(max_length or config.n_positions, config.n_positions)
        ends = config.eos_token_id
        self._ends = () if ends is None else tuple(np.ravel(ends).tolist())
        first = config.bos_token_id if config.bos_token_id is not None else (self._ends or (None,))[0]
        self._first = [] if first is None else [int(first)]  # what a text without a context follows
        self._scorer = Predictor(deployer, model=model, collate_fn=self._collate_scored, pred_fn=_score)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation after its context, and whether greedy decoding returns it.
        The arguments of a request are `(context, continuation)`."""
        return self._scores([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Returns the log-probability of each text, all of it. One that is too long is cut into windows; the last one also
        has tokens of the one before as its context. The argument of a request is `(text,)`."""
        pairs, owners = [], []
        for i, request in enumerate(requests):
            ids = self._encode(request.args[0])
            known = ids[:0] if self._first else ids[:1]  # without a first token, nothing predicts that of the text
            for start in range(len(known), len(ids), self.max_length):
                window = ids[start : start + self.max_length]
                context = ids[max(start + len(window) - self.max_length - 1, 0) : start] if start else self._first
                pairs.append((context, window))
                owners.append(i)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._scores(pairs), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Returns what follows each context, up to the first of the strings `until`.

        The arguments of a request are `(context, options)`. The known options are `until`, `max_gen_toks`, `do_sample`,
        `temperature`, `top_p` and `top_k`."""
        groups: dict[Any, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        found: dict[int, str] = {}
        for places in groups.values():
            options = dict(requests[places[0]].args[1])
            contexts = [requests[i].args[0] for i in places]
            found |= dict(zip(places, self._generate(contexts, options), strict=True))
        return [found[i] for i in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation."""
        if self._template is None:
            raise wrong("chat_template", "a function for chats", "None", "Pass that of the tokenizer.")
        return self._template(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """What the harness calls the tokenizer in its cache: another one of the same model has another name."""
        return f"{type(self._model).__name__}-{zlib.crc32(self._tokenizer.to_str().encode()):08x}"

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a context and its continuation. Both are encoded as one text, and spaces between them belong to
        the continuation, as in the harness."""
        if not context:
            return self._first, self._encode(continuation)
        end = len(context.rstrip())
        before = self._encode(context[:end])
        return before or self._first, self._encode(context + continuation)[len(before) :]

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        _check_begun(before for before, _ in pairs)
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))  # equal lengths together
        scores = self._scorer.predict([pairs[i] for i in order], batch_size=self._batch_size)
        by_place = dict(zip(order, scores, strict=True))
        return [(float(by_place[i][0]), bool(by_place[i][1])) for i in range(len(pairs))]

    def _collate_scored(self, pairs: list[tuple[list[int], list[int]]]) -> dict[str, np.ndarray]:
        """Returns texts padded on the right, and the labels of continuations: the next tokens, and -1 elsewhere."""
        texts = [[*before, *after][-self.max_length - 1 :] for before, after in pairs]
        width = _rounded(max(map(len, texts)) - 1, self.max_length)
        ids, labels = np.zeros((len(texts), width), np.int32), np.full((len(texts), width), -1, np.int32)
        for i, (text, (_, after)) in enumerate(zip(texts, pairs, strict=True)):
            n, n_new = len(text) - 1, min(len(after), len(text) - 1)
            ids[i, :n], labels[i, n - n_new : n] = text[:-1], text[len(text) - n_new :]
        lengths = np.array([len(text) - 1 for text in texts])
        return {"ids": ids, "labels": labels, "mask": np.arange(width) < lengths[:, None]}

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        until, n_new = options.pop("until", []), options.pop("max_gen_toks", 256)
        stops = [until] if isinstance(until, str) else [*until]
        known = {name: options.pop(name) for name in ("do_sample", "temperature", "top_p", "top_k") if name in options}
        if options:
            raise wrong("gen_kwargs", "no other options than those known", ", ".join(options), "Remove them.")
        most = self.max_length - int(n_new)
        if most < 1 or n_new < 1:
            rule = f"1 to {self.max_length - 1} tokens, as a text has at most {self.max_length}"
            raise wrong("max_gen_toks", rule, n_new, "Pass fewer in `gen_kwargs`, or a larger `max_length`.")
        if not known.get("do_sample") or known.get("temperature") == 0:
            known = {"do_sample": False}
        rows = [self._encode(text) or self._first for text in contexts]
        _check_begun(rows)
        if n_cut := sum(len(row) > most for row in rows):
            warn(
                f"`max_gen_toks`: expected contexts of at most {most} tokens, so that {n_new} may follow, got {n_cut} of "
                f"{len(rows)} that are longer: they lose their start. Pass a smaller one in `gen_kwargs` to keep more."
            )
        rows = [row[-most:] for row in rows]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        pred_fn = partial(
            _continue, max_new_tokens=int(n_new), stop_strings=stops or None, tokenizer=self._tokenizer,
            eos_token_id=self._ends, **known,
        )  # fmt: skip
        collate_fn = partial(_pad_left, most=most)
        predictor = Predictor(self._deployer, model=self._model, collate_fn=collate_fn, pred_fn=pred_fn)
        found = predictor.predict([rows[i] for i in order], batch_size=self._batch_size, key=self._deployer.next_key())
        texts = {i: self._cut(tokens.tolist(), stops) for i, tokens in zip(order, found, strict=True)}
        return [texts[i] for i in range(len(rows))]

    def _cut(self, ids: list[int], stops: Sequence[str]) -> str:
        """Returns the text of tokens up to the first end."""
        end = next((i for i, id in enumerate(ids) if id in self._ends), len(ids))
        text = self._tokenizer.decode(ids[:end])
        return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def harness_lm(deployer: Deployer, model: Any, tokenizer: Any, **options: Any) -> Any:
    """Returns a model for `lm_eval.simple_evaluate(model=...)`: a `HarnessLM` that is an `lm_eval.api.model.LM`.

    **Arguments:** those of `HarnessLM`.

    Raises ImportError without lm_eval.
    """
    try:
        from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("`harness_lm`: expected lm_eval, got no such package. Run `pip install lm_eval`.") from None
    return type("RedeqxLM", (HarnessLM, LM), {})(deployer, model, tokenizer, **options)


def _score(model: Any, batch: dict[str, Array], key: Any) -> tuple[Float[Array, " batch"], Bool[Array, " batch"]]:
    """Returns the summed log-probability of each row's labels, and whether all of them are the most likely tokens. The
    mask is needed where numbers depend on the length of a text, as with LongRoPE."""

    def score_chunk(hidden: Float[Array, "chunk d"], labels: Int[Array, " chunk"]) -> tuple[Array, Array]:
        logits = model.logits(hidden).astype(jnp.float32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
        return jnp.sum(jnp.where(labels >= 0, chosen, 0.0)), jnp.all((labels < 0) | (jnp.argmax(logits, -1) == labels))

    def score_row(ids: Int[Array, " seq"], labels: Int[Array, " seq"], mask: Bool[Array, " seq"]) -> tuple[Array, Array]:
        chunk = min(_CHUNK, len(ids))
        fill = -len(ids) % chunk
        hidden = jnp.pad(model.hidden(ids, mask=mask), ((0, fill), (0, 0)))
        parts = (
            einops.rearrange(hidden, "(n chunk) d -> n chunk d", chunk=chunk),
            einops.rearrange(jnp.pad(labels, (0, fill), constant_values=-1), "(n chunk) -> n chunk", chunk=chunk),
        )
        scores, greedy = jax.lax.map(lambda part: score_chunk(*part), parts)
        return jnp.sum(scores), jnp.all(greedy)

    return jax.vmap(score_row)(batch["ids"], batch["labels"], batch["mask"])


def _check_begun(rows: Iterable[list[int]]) -> None:
    if any(not row for row in rows):
        raise wrong("bos_token_id", "a token before a text without a context", "None", "Set it in the config.")


def _continue(model: Any, batch: dict[str, Array], key: Any, **options: Any) -> Int[Array, "batch new"]:
    tokens = generate(model, batch["ids"], mask=batch["mask"], key=key, **options)
    assert isinstance(tokens, jax.Array)
    return tokens


def _pad_left(rows: list[list[int]], most: int) -> dict[str, np.ndarray]:
    width = _rounded(max(map(len, rows)), most)
    ids = np.stack([np.pad(np.array(row, np.int32), (width - len(row), 0)) for row in rows])
    return {"ids": ids, "mask": np.stack([np.arange(width) >= width - len(row) for row in rows])}


def _rounded(length: int, most: int) -> int:
    """Returns a length of a few kinds, each of which is compiled once."""
    return min(max(64, 1 << (length - 1).bit_length()), most)
