"""A small model for chats with random weights, as a Hugging Face folder, which examples tune further."""

import equinox as eqx
import jax

from examples._chat import learn_chat, save_chat_model
from examples._questions import conversations
from redeqx.models.llama import Llama, LlamaConfig


def chat_folder(path):
    chat = learn_chat(conversations("train", 200, 0), 320)
    config = LlamaConfig(
        vocab_size=320, n_positions=64, d_model=16, d_mlp=32, n_layers=1, n_heads=2, init_std=0.3, eos_token_id=chat.ends[0],
        bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return save_chat_model(eqx.filter_jit(Llama)(config, key=jax.random.key(0)), config, chat, path)
