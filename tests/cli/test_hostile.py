"""Folders of others whose names and texts hold control characters: no command and no error prints them raw."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from redeqx.checkpoint import CheckpointManager
from redeqx.cli import main
from redeqx.models import from_pretrained

ESCAPE = "\x1b[31mX\x1b]0;title\x07\r\x9b\u202e"


def is_safe(text):
    return not {"\x1b", "\x07", "\r", "\x9b", "\u202e"} & set(text)


def make(root):
    """Folders with hostile names, and the arguments of commands that show them."""
    weights = {f"w{ESCAPE}": np.ones(3, np.float32)}
    (root / "names").mkdir()
    for stem in ("model", f"m{ESCAPE}"):
        save_file(weights, root / "names" / f"{stem}.safetensors")
    (root / "above" / f"a{ESCAPE}").mkdir(parents=True)
    save_file(weights, root / "above" / f"a{ESCAPE}" / "model.safetensors")
    (root / "other").mkdir()
    (root / "other" / f"o{ESCAPE}").touch()
    texts = {"step": ESCAPE, "metrics": {ESCAPE: ESCAPE}, "mesh": {ESCAPE: ESCAPE}, "redeqx": ESCAPE}
    CheckpointManager(root / "run" / "ckpts").save(1, {"model": weights}, texts, tags=["last", f"argmax_{ESCAPE}"])
    (root / "config").mkdir()
    (root / "config" / "config.json").write_text(json.dumps({"model_type": ESCAPE, "architectures": [ESCAPE]}))
    save_file(weights, root / "config" / "model.safetensors")
    return [
        ["inspect", root / "names"],
        ["inspect", root / "names", "--kind", "x"],
        ["inspect", root / "names", "--match", "x"],
        ["inspect", root / "above"],
        ["inspect", root / "above" / f"a{ESCAPE}"],
        ["inspect", root / "other"],
        ["inspect", root / "run"],
        ["inspect", root / "run" / "ckpts" / "x"],
        ["inspect", root / "config"],
    ]


def test_commands_escape_control_characters(tmp_path, capsys):
    seen = ""
    for argv in make(tmp_path):
        main([*map(str, argv)])
        out, err = capsys.readouterr()
        assert out or err
        assert is_safe(out + err), (argv, out + err)
        seen += out + err
    assert seen.count(r"\x1b[31mX\x1b]0;title\x07\r\x9b") > 9 and r"\u202e" in seen  # escaped, not dropped


@pytest.mark.parametrize("folder", ["other", "config", "pickles"])
def test_errors_of_from_pretrained_escape_control_characters(tmp_path, folder):
    make(tmp_path)
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "pickles" / f"p{ESCAPE}.bin").touch()
    with pytest.raises(ValueError, match=r"\\x1b\[31mX") as raised:
        from_pretrained(tmp_path / folder)
    assert is_safe(str(raised.value))
