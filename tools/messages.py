"""Print every message that Bottega shows, with file and line, to review them for one voice.

    python tools/messages.py                 all of them
    python tools/messages.py error help      only these kinds: error, warning, console, help
    python tools/messages.py --path src/bottega/data

Collected from the syntax tree: the text of raised errors, of console and warning calls, of notes and of argparse help. Values inserted
at run time are shown as {expression}.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSOLE_CALLS = {"info", "print_notice", "print_result", "log", "say", "print"}
WARNING_CALLS = {"warn", "warning"}
HELP_CALLS = {"add_argument", "add_argument_group", "add_parser", "ArgumentParser", "Verb"}
NOTE_NAMES = {"notes", "problems", "hints"}
KINDS = ("error", "warning", "console", "help")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"which kinds to print: {', '.join(KINDS)} (default: all)")
    parser.add_argument(
        "--path", type=Path, default=ROOT / "src" / "bottega", help="a file or folder (default: src/bottega)"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.kinds) - set(KINDS))
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}; choose from {', '.join(KINDS)}")
    path = arguments.path.resolve()
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    for file in files:
        for line, kind, text in sorted(set(find_messages(ast.parse(file.read_text(encoding="utf-8"))))):
            if not arguments.kinds or kind in arguments.kinds:
                name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
                print(f"{name}:{line}: {kind}: {text}")


def find_messages(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, kind and template of each message in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _texts("error", node.exc)
        elif isinstance(node, ast.Call):
            kind = _kind_of_call(node)
            if kind is not None:
                yield from _texts(kind, node)
        elif isinstance(node, ast.AugAssign) and _name(node.target) in NOTE_NAMES and isinstance(node.value, ast.List):
            for element in node.value.elts:
                yield from _text("console", element)


def _kind_of_call(call: ast.Call) -> str | None:
    name = _name(call.func)
    if name in HELP_CALLS:
        return "help"
    if name in WARNING_CALLS:
        return "warning"
    if name in CONSOLE_CALLS:
        return "console"
    if name in ("append", "extend") and isinstance(call.func, ast.Attribute) and _name(call.func.value) in NOTE_NAMES:
        return "console"
    # An error that is built before it is raised, or collected to be raised with others.
    return "error" if name.endswith(("Error", "Problem", "Failed")) and name[0].isupper() else None


def _texts(kind: str, call: ast.Call) -> Iterator[tuple[int, str, str]]:
    if kind == "help":
        values = [keyword.value for keyword in call.keywords if keyword.arg in ("help", "description", "usage")]
        values += call.args[:1] if _name(call.func) == "Verb" else []
    else:
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
    for value in values:
        yield from _text(kind, value)


def _text(kind: str, node: ast.expr) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, template) of a string, an f-string, strings joined by + or both branches of a conditional; skip single words."""
    if isinstance(node, ast.IfExp):
        yield from _text(kind, node.body)
        yield from _text(kind, node.orelse)
        return
    text = _template(node)
    if text is not None and " " in text.strip():
        yield node.lineno, kind, " ".join(text.split())


def _template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        if left is not None or right is not None:
            return (left or f"{{{ast.unparse(node.left)}}}") + (right or f"{{{ast.unparse(node.right)}}}")
    return None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


if __name__ == "__main__":
    main()
