"""Writes `pages/errors.md`: every message that redeqx raises, from its sources, for those who search for one.

python docs/errors.py
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "pages" / "errors.md"
HEAD = """# Errors

Each message says what was expected, what was found, and what to do next. `…` stands for what differs from run to run.
The list is made from the sources; look for a few words of yours.
"""
_NAMES = {"_": "Deployer, Trainer, Predictor"}  # of what is in no package


def messages(source: str) -> Iterator[tuple[str, str]]:
    """The name of each error that a file raises with a text of its own, and the text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CHECKS and len(node.args) > 1:
            yield "ValueError", CHECKS[ast.unparse(node.func)](*node.args)
        if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
            continue
        kind, text = ast.unparse(node.exc.func).split(".")[-1], _text(node.exc.args[-1 if kind_takes_code(node.exc) else 0])
        if len(re.findall(r"[a-z]{2,}", text)) >= 4:
            yield kind, text


def kind_takes_code(call: ast.Call) -> bool:
    """Whether an error's text is not its first argument, as of OSError(errno, text, path)."""
    return ast.unparse(call.func) == "OSError" and len(call.args) == 2


def _text(node: ast.AST) -> str:
    """The text of an expression, with `…` for what is computed."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def _value(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Constant) else "…"


def _of_count(_value_given: ast.AST, name: ast.AST, least: ast.AST | None = None, *_rest: ast.AST) -> str:
    return f"`{_text(name)}`: expected at least {1 if least is None else _value(least)}, got …."


def _of_choice(_value_given: ast.AST, name: ast.AST, choices: ast.AST) -> str:
    if not isinstance(choices, ast.Tuple):
        return f"`{_text(name)}`: expected one of …, got …."
    *most, last = map(_value, choices.elts)
    return f"`{_text(name)}`: expected {', '.join(most)} or {last}, got …."


def _of_number(_value_given: ast.AST, name: ast.AST, expected: ast.AST, *_rest: ast.AST) -> str:
    return f"`{_text(name)}`: expected {_text(expected)}, got …."


# What the checks of `redeqx.errors` raise, from their arguments.
CHECKS = {"check_count": _of_count, "check_choice": _of_choice, "check_number": _of_number}


def page() -> str:
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted([*ROOT.glob("redeqx/**/*.py"), *ROOT.glob("models/**/*.py")]):
        parts = path.relative_to(ROOT).parts
        if parts[:2] == ("redeqx", "models"):  # a link to models/
            continue
        package = "models" if parts[0] == "models" else parts[1] if len(parts) > 2 else "_"
        found.setdefault(package, set()).update(messages(path.read_text()))
    lines = [HEAD]
    for package, raised in sorted(found.items()):
        if raised:
            lines += [f"## {_NAMES.get(package, f'redeqx.{package}')}", ""]
            lines += [f"- **{kind}**: {_as_markdown(text)}" for kind, text in sorted(raised, key=lambda each: each[::-1])]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _as_markdown(text: str) -> str:
    """The text on one line; what is in backticks stays code, and nothing else is taken for markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if i % 2 else re.sub(r"([\\*_<>\[\]#|])", r"\\\1", part) for i, part in enumerate(parts))


if __name__ == "__main__":
    PAGE.write_text(page())
