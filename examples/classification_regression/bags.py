"""Texts as bags of words and pairs of words: a model of their embeddings, to learn from few texts, and the baselines."""

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

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0)  # of the linear baseline, one of which is chosen on the validation set


class Bag(eqx.Module):
    """The mean of the embeddings of a text's words and pairs of words, and a linear layer.

    Of two texts the layer gets where their means agree, where they differ, and their cosine.
    """

    embedding: eqx.nn.Embedding
    dropout: eqx.nn.Dropout  # of words: the bag is too large for a few thousand texts otherwise
    head: eqx.nn.Linear

    def __init__(self, idf: np.ndarray, width: int, n_texts: int, n_outputs: int, *, key: jax.Array):
        keys = jax.random.split(key)
        # Frequent words say little, and begin small.
        weight = jax.random.normal(keys[0], (len(idf), width)) * (idf / idf.mean())[:, None] / width**0.5
        self.embedding, self.dropout = eqx.nn.Embedding(weight=weight), eqx.nn.Dropout(0.5)
        self.head = eqx.nn.Linear(width if n_texts == 1 else 2 * width + 1, n_outputs, key=keys[1])

    def __call__(self, ids: jax.Array, *, key: jax.Array) -> jax.Array:
        """Logits [classes], or [1] number, of ids [texts, words], 0 where there is no word."""
        is_word = (ids > 0).astype(self.embedding.weight.dtype)
        kept = self.dropout(is_word, key=key) / jnp.sqrt(jnp.maximum(is_word.sum(-1, keepdims=True), 1))
        means = jnp.einsum("tn,tnd->td", kept, jax.vmap(jax.vmap(self.embedding))(ids))
        if len(means) == 1:
            return self.head(means[0])
        a, b = means
        cosine = a @ b / jnp.sqrt((a @ a) * (b @ b) + 1e-6)
        return self.head(jnp.concatenate([a * b, jnp.abs(a - b), cosine[None]]))


def words(text: str) -> list[str]:
    """The words and signs of a text in lower case, and each with the one after it, its ends included."""
    found = re.findall(r"\w+|[^\w\s]", text.lower())
    ends = ["<", *found, ">"]
    return found + [f"{a} {b}" for a, b in pairwise(ends)]


def learn_words(examples: Examples, n_ids: int) -> tuple[dict[str, int], np.ndarray]:
    """The ids, from 1 on, of what is in two texts or more, the commonest first; and the rows' inverse document frequency."""
    texts = [text for texts, _ in examples for text in texts]
    # In an order that every process and every rerun has, which that of a set is not.
    counts = Counter(word for text in texts for word in dict.fromkeys(words(text)))
    known = [(word, n) for word, n in counts.most_common(n_ids - 1) if n > 1]
    idf = np.zeros(embedding_rows(len(known) + 1), np.float32)
    idf[1 : len(known) + 1] = np.log(len(texts) / np.array([n for _, n in known]))
    return {word: i for i, (word, _) in enumerate(known, start=1)}, idf


def encode_bags(task: Task, ids: dict[str, int], n_words: int) -> Task:
    """The task with the texts of its examples as ids [texts, n_words]: longer ones are cut, shorter ones end in zeros."""

    def row(text: str) -> list[int]:
        known = [ids[word] for word in words(text) if word in ids][:n_words]
        return known + [0] * (n_words - len(known))

    def encoded(examples: Examples) -> Examples:
        return [({"ids": np.array([row(text) for text in texts], np.int32)}, target) for texts, target in examples]

    return map_examples(task, encoded)


# --- baselines -------------------------------------------------------------------------------------------------------


def baselines(task: Task) -> dict[str, dict[str, float]]:
    """What the test set is scored without any text, by the commonest class or the mean, and by a linear model of its words.

    The linear model (logistic regression, or ridge) sees words weighed by tf-idf, alone or with pairs of them, whichever
    scores better on the validation set, and so its penalty. Of two texts it sees what `Bag` does.
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
