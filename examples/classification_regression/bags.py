"""Bags of words and word pairs: a model for small text data sets."""

import re
from collections import Counter
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from examples._texts import embedding_rows
from examples.classification_regression.tasks import Examples, Task, map_examples


class Bag(eqx.Module):
    """The mean of the embeddings of a text's words and word pairs, followed by a linear layer.

    For a pair of texts, the layer's input is the product and the absolute difference of their means, and their cosine
    similarity.
    """

    embedding: eqx.nn.Embedding
    dropout: eqx.nn.Dropout  # drops words; without it the bag overfits a few thousand texts
    head: eqx.nn.Linear

    def __init__(self, idf: np.ndarray, width: int, n_texts: int, n_outputs: int, *, key: jax.Array):
        keys = jax.random.split(key)
        # Frequent words carry little information, so their initial embeddings are small.
        weight = jax.random.normal(keys[0], (len(idf), width)) * (idf / idf.mean())[:, None] / width**0.5
        self.embedding, self.dropout = eqx.nn.Embedding(weight=weight), eqx.nn.Dropout(0.5)
        self.head = eqx.nn.Linear(width if n_texts == 1 else 2 * width + 1, n_outputs, key=keys[1])

    def __call__(self, ids: jax.Array, *, key: jax.Array) -> jax.Array:
        """Returns logits [classes], or one number [1], for ids [texts, words]; 0 is padding."""
        is_word = (ids > 0).astype(self.embedding.weight.dtype)
        kept = self.dropout(is_word, key=key) / jnp.sqrt(jnp.maximum(is_word.sum(-1, keepdims=True), 1))
        means = jnp.einsum("tn,tnd->td", kept, jax.vmap(jax.vmap(self.embedding))(ids))
        if len(means) == 1:
            return self.head(means[0])
        a, b = means
        cosine = a @ b / jnp.sqrt((a @ a) * (b @ b) + 1e-6)
        return self.head(jnp.concatenate([a * b, jnp.abs(a - b), cosine[None]]))


def words(text: str) -> list[str]:
    """Returns the lower-case words and punctuation marks of a text, and all adjacent pairs, including the text's ends."""
    found = re.findall(r"\w+|[^\w\s]", text.lower())
    ends = ["<", *found, ">"]
    return found + [f"{a} {b}" for a, b in pairwise(ends)]


def learn_words(examples: Examples, n_ids: int) -> tuple[dict[str, int], np.ndarray]:
    """Assigns ids, from 1, to words and pairs in two or more texts, the most frequent first. Also returns their inverse
    document frequencies."""
    texts = [text for texts, _ in examples for text in texts]
    # `dict.fromkeys` instead of a set: its order is the same in every process and every run.
    counts = Counter(word for text in texts for word in dict.fromkeys(words(text)))
    known = [(word, n) for word, n in counts.most_common(n_ids - 1) if n > 1]
    idf = np.zeros(embedding_rows(len(known) + 1), np.float32)
    idf[1 : len(known) + 1] = np.log(len(texts) / np.array([n for _, n in known]))
    return {word: i for i, (word, _) in enumerate(known, start=1)}, idf


def encode_bags(task: Task, ids: dict[str, int], n_words: int) -> Task:
    """Returns the task with its texts as ids [texts, n_words], truncated, or padded with zeros."""

    def row(text: str) -> list[int]:
        known = [ids[word] for word in words(text) if word in ids][:n_words]
        return known + [0] * (n_words - len(known))

    def encoded(examples: Examples) -> Examples:
        return [({"ids": np.array([row(text) for text in texts], np.int32)}, target) for texts, target in examples]

    return map_examples(task, encoded)
