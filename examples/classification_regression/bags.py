"""Bags of words and word pairs: a model for small text data sets, and the baselines."""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge

from .._texts import embedding_rows
from .tasks import METRICS, Examples, Task, map_examples, measure

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)  # candidates for the linear baseline; one is selected on the validation set


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


# --- baselines -------------------------------------------------------------------------------------------------------


def baselines(task: Task) -> dict[str, dict[str, float]]:
    """Returns the test scores of two baselines: the most frequent class (or the mean), and a linear model of the words.

    The linear model is a logistic or a ridge regression on tf-idf features of words, or of words and word pairs. The
    features and the penalty are selected on the validation set. For a pair of texts, it has the same inputs as `Bag`.
    """
    targets = np.array([target for _, target in task.train])
    constant = np.bincount(targets, minlength=2) if task.classes else targets.mean(keepdims=True)
    scores = {"majority": measure(task, task.test, np.tile(constant, (len(task.test), 1)))}
    found = []
    for n_most in (1, 2):
        vectorizer = TfidfVectorizer(ngram_range=(1, n_most), min_df=2, sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
        vectorizer.fit([text for texts, _ in task.train for text in texts])
        train, validation, test = (_features(vectorizer, part) for part in (task.train, task.validation, task.test))
        for penalty in PENALTIES:
            if task.classes:
                model = LogisticRegression(C=1 / penalty, max_iter=1000).fit(train, targets)
                outputs = [model.decision_function(x) for x in (validation, test)]
                outputs = [np.stack([-x, x], 1) if x.ndim == 1 else x for x in outputs]
            else:
                model = Ridge(penalty).fit(train, targets)
                outputs = [model.predict(x)[:, None] for x in (validation, test)]
            found.append((measure(task, task.validation, outputs[0])[METRICS[task.name][0]], len(found), outputs[1]))
    scores["bag of words"] = measure(task, task.test, max(found, key=lambda entry: entry[:2])[2])
    return scores


def _features(vectorizer: TfidfVectorizer, examples: Examples) -> Any:
    n_texts = len(examples[0][0])
    parts = [vectorizer.transform([texts[i] for texts, _ in examples]) for i in range(n_texts)]
    if n_texts == 1:
        return parts[0]
    a, b = parts
    both = a.multiply(b)
    return sparse.hstack([abs(a - b), both, sparse.csr_matrix(both.sum(1))]).tocsr()
