"""Writes `pages/errors.md`: every message that redeqx raises or warns with, collected from its sources.

python docs/errors.py
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "pages" / "errors.md"
HEAD = """# Errors

Each message says what was expected, what was found, and what to do next. `…` stands for values that vary.
The list is generated from the sources: search it for a few words of your message. Each section begins with the usual causes.
"""
# For each package: the usual causes of its errors, and where to look first.
CAUSES = {
    "_": "Invalid arguments, or calls in the wrong order, of a Deployer, Trainer or Predictor. Nothing has been "
    "computed yet.",
    "checkpoint": "A checkpoint file is damaged (a full disk, an incomplete copy) or belongs to another model, or another "
    "run holds the folder. [Checkpoints](ideas/checkpoints.md) describes the files.",
    "cli": "Arguments of the `redeqx` command. `--help` lists the valid ones.",
    "data": "Examples that have no length, change between epochs, or cannot be read again; or a damaged token cache. "
    "[Data](guides/data.md) describes valid examples.",
    "distributed": "A process that is missing, lost or late, or has other arguments than the rest. Look at the first "
    "traceback of the named process. [Clusters and pods](guides/clusters.md) has a table of the consequences.",
    "errors": "A check of your input before any work: a model that is not a PyTree of arrays, a function with the wrong "
    "arguments.",
    "kernels": "Arrays for `redeqx.attention` whose shapes do not agree. Inputs that only one kernel does not support raise "
    "no error: another implementation is used.",
    "machine": "Missing devices: a product of shards that does not divide their number, an unknown topology, or a compiler "
    "that is not installed.",
    "models": "A Hugging Face folder with a key or a tensor that the family does not have, or invalid arguments of "
    "`generate`.",
    "monitor": "A tracker that does not respond, or a value that is not a metric. A tracker never ends a run.",
    "optimizers": "A leaf that the optimizer cannot update in the requested way.",
    "partition": "A split that a leaf does not allow, or a name that is not a leaf. `print(plan.explain())` lists all "
    "leaves.",
    "storage": "The object store: its address, the credentials, or the network. Requests were retried for three minutes "
    "first.",
    "tracing": "A function that is passed to `transformed`.",
    "transforms": "A loss whose equations depend on the number of rows, so that parts of a batch cannot be computed as one.",
    "training": "The return value of `loss_fn`, `pred_fn`, `grad_fn` or a callback, invalid arguments of a fit, or a loss "
    "that is not finite.",
    "compiled": "Findings in the compiled step, after the first compilation.",
}
WARNING = "warning"


def messages(source: str) -> Iterator[tuple[str, str]]:
    """The kinds and texts of the errors and warnings that the functions of a file create."""
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        named = dict(_assigned(function))
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for kind, text in _of_call(call, named):
                if len(re.findall(r"[a-z]{2,}", text)) >= 3:
                    yield kind, text


def _of_call(call: ast.Call, named: Mapping[str, list[ast.expr]]) -> Iterator[tuple[str, str]]:
    name = ast.unparse(call.func).split(".")[-1]
    if name in CHECKS and len(call.args) > 1:
        yield CHECKS[name](*call.args)
    elif name == "warn" and call.args:
        yield from ((WARNING, text) for text in _texts(call.args[0], named))
    elif name.endswith("Error") and call.args:
        # An OSError's text is not its first argument: OSError(errno, text, path).
        with_number = len(call.args) > 1 and (
            name == "OSError" or ast.unparse(call.args[0]).startswith(("errno.", "error."))
        )
        yield from ((name, text) for text in _texts(call.args[1 if with_number else 0], named))


def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """The values that are assigned to each variable of a function."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
    return values


def _texts(node: ast.expr, named: Mapping[str, list[ast.expr]]) -> list[str]:
    """The texts that an expression may have; a variable has the texts that are assigned to it."""
    if isinstance(node, ast.Name) and node.id in named:
        return [_text(value) for value in named[node.id]]
    return [_text(node)]


def _text(node: ast.AST) -> str:
    """The text of an expression, with `…` for computed parts."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "…"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def _value(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Constant) else "…"


def _of_count(_value_given: ast.AST, name: ast.AST, least: ast.AST | None = None, *_rest: ast.AST) -> tuple[str, str]:
    return "ValueError", f"`{_text(name)}`: expected at least {1 if least is None else _value(least)}, got …."


def _of_choice(_value_given: ast.AST, name: ast.AST, choices: ast.AST) -> tuple[str, str]:
    if not isinstance(choices, ast.Tuple):
        return "ValueError", f"`{_text(name)}`: expected one of …, got …."
    *most, last = map(_value, choices.elts)
    return "ValueError", f"`{_text(name)}`: expected {', '.join(most)} or {last}, got …."


def _of_number(_value_given: ast.AST, name: ast.AST, expected: ast.AST, *_rest: ast.AST) -> tuple[str, str]:
    return "ValueError", f"`{_text(name)}`: expected {_text(expected)}, got …."


def _of_damage(_path: ast.AST, rule: ast.AST, got: ast.AST) -> tuple[str, str]:
    return "DamagedError", f"`…`: expected {_text(rule)}, got {_text(got)}. The file is damaged or unfinished."


# What the checks of `redeqx.errors` raise, derived from their arguments.
CHECKS = {"check_count": _of_count, "check_choice": _of_choice, "check_number": _of_number, "damaged": _of_damage}


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
            title = "Deployer, Trainer, Predictor" if package == "_" else f"redeqx.{package}"
            lines += [f"## {title}", "", CAUSES[package], ""]
            lines += [f"- **{kind}**: {_as_markdown(text)}" for kind, text in sorted(raised, key=lambda each: each[::-1])]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _as_markdown(text: str) -> str:
    """The text on one line. Code in backticks is unchanged; other markup is escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if i % 2 else re.sub(r"([\\*_<>\[\]#|])", r"\\\1", part) for i, part in enumerate(parts))


if __name__ == "__main__":
    PAGE.write_text(page())
