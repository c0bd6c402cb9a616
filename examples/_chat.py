"""Conversations as tokens: the chat template of a tokenizer, labels for replies only, and prompts for the next reply.

A conversation is a list of messages, `{"role": "user", "content": "..."}`, as in the data of most tuning libraries. A
folder's own template is Jinja, and needs `pip install jinja2`. A model that is trained here uses ChatML.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from tokenizers import Tokenizer

import redeqx
from examples._texts import learn_tokenizer, load_tokenizer
from redeqx.models import Decoder, from_pretrained, save_pretrained

Message = dict[str, str]
IGNORED = -100  # the label of tokens that are no reply
START, END = "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """Renders a conversation as the template `CHATML` does, without Jinja."""
    text = "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
    return f"{text}{START}assistant\n" if add_generation_prompt else text


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its chat template.

    **Arguments:**

    - `render`: the template: maps messages, and whether the assistant's next reply begins at the end, to a text.
    - `ends`: the ids that end a reply.
    """

    tokenizer: Tokenizer
    render: Callable[[Sequence[Message], bool], str]
    ends: tuple[int, ...]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids  # the template has the special tokens

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Returns the ids of a conversation up to the place where the assistant's next reply begins."""
        return self.ids(self.render(messages, True))

    def reply(self, messages: Sequence[Message], reply: str) -> list[int]:
        """Returns the ids of the assistant's next reply with its end."""
        prompt = self.render(messages, True)
        text = self.render([*messages, {"role": "assistant", "content": reply}], False)
        if not text.startswith(prompt):
            raise ValueError(
                f"`chat_template`: expected one whose replies follow the prompt, got {text[len(prompt) - 40 :]!r} after "
                f"{prompt[-40:]!r}. Use a template that leaves earlier messages unchanged."
            )
        ids = self.ids(text[len(prompt) :])
        n = next((i for i, id in enumerate(ids, start=1) if id in self.ends), None)
        if n is None:
            raise ValueError(
                f"`eos_token_id`: expected an id that ends a reply, got {self.ends}, and the reply {ids}. "
                "Set that of the chat template in config.json."
            )
        return ids[:n]

    def encode(self, messages: Sequence[Message]) -> dict[str, np.ndarray]:
        """Returns `tokens` and `labels`: the next tokens where the assistant says them, with the end of each reply."""
        ids, labels = np.zeros(0, np.int32), np.zeros(0, np.int32)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, reply = self.prompt(messages[:i]), self.reply(messages[:i], message["content"])
                given = np.array(prompt[len(ids) :], np.int32)  # what follows the last reply
                ids = np.concatenate([ids, given, reply]).astype(np.int32)
                labels = np.concatenate([labels, np.full_like(given, IGNORED), reply]).astype(np.int32)
        if not len(ids):
            raise ValueError(f"`messages`: expected a reply of the assistant, got {messages!r}. Add one, or leave it out.")
        return {"tokens": ids[:-1], "labels": labels[1:]}

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of a generated reply, without its end."""
        n = next((i for i, id in enumerate(ids) if id in self.ends), len(ids))
        return self.tokenizer.decode([int(id) for id in ids[:n]]).strip()


class PolicyAndReference(eqx.Module):
    """A model that is trained, and what it was before, which is frozen. They are the same arrays until the first update."""

    policy: Any
    reference: Any

    @property
    def trainable(self) -> "PolicyAndReference":
        """Which leaves are trained, for a Trainer."""
        return PolicyAndReference(
            jax.tree.map(eqx.is_inexact_array, self.policy), jax.tree.map(lambda _: False, self.reference)
        )


def pad_left(prompts: Sequence[Sequence[int]], width: int) -> dict[str, np.ndarray]:
    """Returns a batch of prompts, padded on the left to `width` tokens, as `generate` expects."""
    rows = [np.array(ids, np.int32) for ids in prompts]
    return {
        "ids": np.stack([np.pad(ids, (width - len(ids), 0)) for ids in rows]),
        "mask": np.stack([np.arange(width) >= width - len(ids) for ids in rows]),
    }


def learn_chat(conversations: Sequence[Sequence[Message]], n_ids: int) -> Chat:
    """Trains a tokenizer of at most `n_ids` ids on conversations, for ChatML."""
    texts = [message["content"] for messages in conversations for message in messages]
    tokenizer = learn_tokenizer([*texts, *["system", "user", "assistant"] * 100], n_ids - 2, split_digits=True)
    tokenizer.add_special_tokens([START, END])
    end = tokenizer.token_to_id(END)
    assert end is not None
    return Chat(tokenizer, chatml, (end,))


def load_chat_model(folder: Path, deployer: redeqx.Deployer | None = None) -> tuple[Any, Any, Chat]:
    """Returns the decoder of a Hugging Face folder, its config, and its tokenizer with the chat template."""
    model, config = from_pretrained(folder, deployer=deployer, kind=Decoder)
    template, tokens = read_template(folder)
    ends = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    render = chatml if template == CHATML else jinja_template(template, tokens)
    return model, config, Chat(load_tokenizer(folder, config.vocab_size), render, ends)


def save_chat_model(model: Any, config: Any, chat: Chat, folder: Path) -> Path:
    """Saves a model as a Hugging Face folder. One that is trained from scratch gets its tokenizer and template too."""
    save_pretrained(model, config, folder)
    if not (folder / "tokenizer.json").exists():
        chat.tokenizer.save(str(folder / "tokenizer.json"))
        fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": CHATML}
        (folder / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")
    return folder


def read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns the chat template of a folder, and its special tokens by name."""
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    template, own = fields.get("chat_template"), folder / "chat_template.jinja"
    if own.is_file():
        template = own.read_text("utf-8")
    elif isinstance(template, list):  # several by name
        template = next((each["template"] for each in template if each["name"] == "default"), None)
    if not isinstance(template, str):
        raise ValueError(f"`{folder}`: expected a chat template, got none. Pass the folder of a model for chats.")
    tokens = {name: fields.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return template, {name: text or "" for name, text in texts.items()}


def jinja_template(template: str, tokens: dict[str, str]) -> Callable[[Sequence[Message], bool], str]:
    """Returns the function of a Jinja template, compiled as `transformers` does. It runs in a sandbox: it is a stranger's
    code."""
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ImportError("`chat_template`: expected jinja2, got no such package. Run `pip install jinja2`.") from None

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = raise_exception
    compiled = environment.from_string(template)
    return lambda messages, add_generation_prompt: compiled.render(
        messages=messages, add_generation_prompt=add_generation_prompt, **tokens
    )
