"""Trains the base model that is fine-tuned if no folder is given: a small LLaMA."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import redeqx
from examples._texts import BOS, EOS, PAD, embedding_rows, learn_tokenizer
from redeqx.data import TokenRows
from redeqx.models import cross_entropy, save_pretrained
from redeqx.models.llama import Llama, LlamaConfig


def optimizer(lr: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr, b2=0.95, weight_decay=0.01))


def collate_fn(rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    ids = np.stack(rows)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def loss_fn(model: Llama, batch: dict[str, jax.Array], key: jax.Array) -> redeqx.Loss:
    return cross_entropy(jax.vmap(model.hidden)(batch["ids"]), batch["labels"], head=model.logits)


def train_base(args: Any, deployer: redeqx.Deployer, corpus: list[str], folder: Path) -> None:
    """Trains a small LLaMA on text and saves it as a Hugging Face folder."""
    tokenizer = learn_tokenizer(corpus, args.n_ids)
    ids = np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(corpus)])[: args.base_tokens]
    examples = TokenRows(ids.astype(np.int32), 2 * args.seq_len + 1, stride=2 * args.seq_len)
    examples = examples[: max(1, len(examples) // args.batch_size) * args.batch_size]  # a smaller update would recompile
    config = LlamaConfig(
        vocab_size=embedding_rows(tokenizer.get_vocab_size()), n_positions=2 * args.seq_len, d_model=args.d_model,
        d_mlp=-(-8 * args.d_model // 96) * 32, n_layers=args.n_layers, n_heads=args.n_heads, is_tied=True,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, init_std=0.05,
    )  # fmt: skip
    key = deployer.next_key()
    model = deployer.init(lambda: Llama(config, key=key))
    lr = deployer.get_lr_schedule_fn(
        len(examples), batch_size=args.batch_size, n_epochs=args.n_base_epochs, learning_rate=10 * args.learning_rate,
        schedule_type="cosine", warmup_ratio=0.05,
    )  # fmt: skip
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optimizer(lr), collate_fn=collate_fn, loss_fn=loss_fn, lr_schedule_fn=lr
    )
    trainer.fit(examples, batch_size=args.batch_size, n_epochs=args.n_base_epochs, save_last_ckpt=True)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_pretrained(trainer.model, config, folder)  # writes config.json last: a folder that has it is complete
