"""Instruction tuning at a small size: it learns, its labels are the replies alone, and templates of folders are used."""

import json
from dataclasses import replace
from operator import attrgetter

import equinox as eqx
import jax
import numpy as np
import pytest

from examples._chat import CHATML, IGNORED, Chat, chatml, jinja_template, learn_chat, load_chat_model, read_template
from examples._questions import BRIEF, FULL, ask, conversations, number_in, part_of
from examples.instruction_tuning.main import Args, collate_fn, loss_fn, main, read_conversations
from redeqx.data import pack
from redeqx.models import from_pretrained, lora
from redeqx.models.llama import Llama, LlamaConfig
from tests.examples._run import run_example

MESSAGES = [
    {"role": "system", "content": "Reply with a number."},
    {"role": "user", "content": "What is 12 + 34?"},
    {"role": "assistant", "content": "46"},
    {"role": "user", "content": "What is 50 - 25?"},
    {"role": "assistant", "content": "25"},
]
TINY = {"n_train": 800, "batch_size": 16, "n_test": 32, "d_model": 32, "n_layers": 1, "n_heads": 2, "eval_every_n_steps": 20}


@pytest.fixture(scope="module")
def chat():
    return learn_chat(conversations("train", 200, 0), 320)


@pytest.mark.sweep
def test_learns_on_a_mesh_and_saves_a_folder_for_chats(tmp_path):
    flags = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", value)]
    run = run_example("instruction_tuning", *flags, "--n-epochs", 2, "--learning-rate", 1e-2, workdir=tmp_path)
    losses = run.series("loss")
    assert losses[-1] < 0.5 * losses[0] and 0 <= run.metrics[-1]["test_exact"] <= 1
    assert "of their tokens are replies" in run.output and (tmp_path / "exact.png").read_bytes().startswith(b"\x89PNG")
    model, config, chat = load_chat_model(tmp_path / "model")
    assert chat.ends == (config.eos_token_id,) and read_template(tmp_path / "model")[0] == CHATML
    assert chat.decode(chat.reply(MESSAGES[:2], "46")) == "46" and model.config == config
    # Tuned further, with its own template.
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(40)), "utf-8")
    args = Args(data=data, pretrained=tmp_path / "model", workdir=tmp_path / "again", n_epochs=20, batch_size=4, seed=1)
    assert main(args) == {"test_exact": 1.0}
    # By adapters of its attention alone, which are saved beside the merged model.
    main(replace(args, workdir=tmp_path / "adapted", lora_rank=4))
    after, _ = from_pretrained(tmp_path / "adapted" / "model")
    found = lora.merge(lora.load_adapter(model, tmp_path / "adapted" / "adapter"))
    for of, differs in (("attention.query", True), ("mlp.up", False)):
        values = [attrgetter(f"stack.blocks.{of}.weight")(each) for each in (model, after, found)]
        assert np.array_equal(values[0], values[1]) != differs
        np.testing.assert_allclose(values[1], values[2], atol=1e-6)


def test_only_replies_are_labels(chat):
    encoded = chat.encode(MESSAGES)
    ids, labels = encoded["tokens"], encoded["labels"]
    assert chat.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == chatml(MESSAGES, False).removesuffix(
        "<|im_end|>\n"
    )
    assert labels[labels != IGNORED].tolist() == [*chat.reply(MESSAGES[:2], "46"), *chat.reply(MESSAGES[:4], "25")]
    assert (ids[1:] == labels[:-1])[labels[:-1] != IGNORED].all()  # a label is the next token
    assert chat.decode(chat.reply(MESSAGES[:4], "25")) == "25"
    assert ids[: len(chat.prompt(MESSAGES[:2]))].tolist() == chat.prompt(MESSAGES[:2])
    assert len(chat.ids("6789")) == 4  # each digit is a token


@pytest.mark.sweep
def test_the_loss_of_packed_conversations_is_that_of_each(chat):
    sizes = {"n_positions": 128, "d_model": 16, "d_mlp": 32, "n_layers": 1, "n_heads": 2, "init_std": 0.3}
    model = eqx.filter_jit(Llama)(LlamaConfig(vocab_size=320, **sizes), key=jax.random.key(0))
    examples = [chat.encode(messages) for messages in (MESSAGES, MESSAGES[:3])]
    rows = pack(examples, 128)
    assert len(rows) == 1
    loss = eqx.filter_jit(loss_fn)(model, collate_fn(list(rows)), jax.random.key(0))
    expected, run = 0.0, eqx.filter_jit(model)
    for example in examples:
        padded = np.pad(example["tokens"], (0, 128 - len(example["tokens"])))  # one shape for both
        log_probs = jax.nn.log_softmax(run(padded))
        expected -= sum(log_probs[t, id] for t, id in enumerate(example["labels"]) if id != IGNORED)
    assert loss.weight == sum(len(chat.reply(MESSAGES[:i], MESSAGES[i]["content"])) for i in (2, 4, 2))
    np.testing.assert_allclose(loss.total, expected, rtol=1e-5)


def test_templates_of_folders(chat, tmp_path):
    pytest.importorskip("jinja2")
    for messages, prompts in ((MESSAGES, False), (MESSAGES[:2], True)):
        assert jinja_template(CHATML, {})(messages, prompts) == chatml(messages, prompts)
    # As in Llama 2, where a system message is a part of the first question; from files in both forms.
    llama = (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n' %}"
        "{% set messages = messages[1:] %}{% endif %}\n    {% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first and system else '') + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    )
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    fields = {**tokens, "chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": llama}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")
    expected = "<s>[INST] Reply with a number.\nWhat is 12 + 34? [/INST] 46</s><s>[INST] What is 50 - 25? [/INST] 25</s>"
    assert jinja_template(*read_template(tmp_path))(MESSAGES, False) == expected
    own = Chat(chat.tokenizer, jinja_template(*read_template(tmp_path)), (2,))
    assert own.ids("</s>") == [2]
    labels = own.encode(MESSAGES)["labels"]
    assert own.tokenizer.decode(labels[labels != IGNORED].tolist(), skip_special_tokens=False) == " 46</s> 25</s>"

    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('No ' + messages[0]['role']) }}", "utf-8")
    with pytest.raises(Exception, match="No system"):
        jinja_template(*read_template(tmp_path))(MESSAGES, False)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}", "utf-8")
    with pytest.raises(Exception, match="unsafe"):
        jinja_template(*read_template(tmp_path))(MESSAGES, False)


def test_questions_of_the_parts_are_about_other_numbers():
    asked = {part: ask(part, 300, 0) for part in ("train", "validation", "test")}
    for part, questions in asked.items():
        for question in questions:
            a, b = (int(word.strip("?,")) for word in question.text.split() if word.strip("?,").isdigit())
            assert part_of(a, b) == part and min(a, b) >= 10
            kinds = {"+": a + b, "-": a - b, "or": max(a, b)}
            assert question.answer == next(value for sign, value in kinds.items() if sign in question.text.split())
            for is_full in (True, False):
                assert number_in(question.reply(question.answer + 1, is_full=is_full)) == str(question.answer + 1)
    texts = [{question.text for question in questions} for questions in asked.values()]
    assert not (texts[0] & texts[1] or texts[0] & texts[2] or texts[1] & texts[2])
    styles = {BRIEF: str.isdigit, FULL: lambda reply: reply.endswith(".")}
    for messages in conversations("test", 50, 0):
        assert all(styles[messages[0]["content"]](m["content"]) for m in messages if m["role"] == "assistant")


def test_invalid_input_is_refused(chat, tmp_path):
    with pytest.raises(ValueError, match=r"`--lora-rank`: expected with `--pretrained`, got 4 alone\."):
        main(Args(lora_rank=4, workdir=tmp_path))
    path = tmp_path / "data.jsonl"
    good = json.dumps({"messages": MESSAGES})
    for bad in ({"messages": MESSAGES[:2]}, {"messages": [{"role": "user"}]}, {"text": "x"}):
        path.write_text(f"{good}\n{json.dumps(bad)}\n", "utf-8")
        with pytest.raises(
            ValueError, match=rf"`{path}` row 2: expected `messages` with `role` and `content`, the last one"
        ):
            read_conversations(path)
    path.write_text(f"{good}\n", "utf-8")
    with pytest.raises(ValueError, match=r"expected conversations for training, validation and test, got 1"):
        read_conversations(path)
    with pytest.raises(ValueError, match=rf"`{tmp_path}`: expected a chat template, got none"):
        read_template(tmp_path)
    with pytest.raises(ValueError, match=r"`eos_token_id`: expected an id that ends a reply, got \(1,\)"):
        Chat(chat.tokenizer, chatml, (1,)).encode(MESSAGES)
    with pytest.raises(ValueError, match=r"`messages`: expected a reply of the assistant"):
        chat.encode(MESSAGES[:2])
    forgets = lambda messages, _: f"{messages[-1]['content']}<|im_end|>"  # noqa: E731
    with pytest.raises(ValueError, match=r"`chat_template`: expected one whose replies follow the prompt"):
        Chat(chat.tokenizer, forgets, chat.ends).encode(MESSAGES)
