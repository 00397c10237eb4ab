"""Programs out of answers: which part of a text is the solution, and what is run to test it.

Models wrap a solution in many ways: in a code fence of some kind, amid prose, cut off before the fence ends, or as the
body of the function alone. Each is found here, so that a score tells of the solution and not of its wrapping.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<mark>`{3,}|~{3,})[ \t]*(?P<language>[\w+#.-]*)[^`\n]*$")
_PYTHON = frozenset({"", "python", "py", "python3", "py3", "pycon", "ipython"})
_CODE = re.compile(
    r"(def|class|async|import|from|if|elif|else|for|while|try|except|finally|with|return|assert|print|pass|raise)\b"
    r"|[@#)\]}]|\"\"\"|'''|[A-Za-z_][\w.]*(\[[^\]]*\])?\s*(=|\+=|:\s*\w+.*=|\()"
)
"""How a line of code without indentation begins; prose seldom does."""
_THOUGHT = "</think>"
_LONGEST = 2000
"""Lines of an answer that are looked at."""


def after_thinking(text: str) -> str:
    """What follows a model's thinking, where it marks it."""
    return text.rpartition(_THOUGHT)[2]


def extract_code(text: str, entry_point: str | None) -> str:
    """The Python source in an answer.

    Fenced blocks come first: the first that defines the function asked for, with what earlier blocks define and import
    before it. Without one, the lines around the function's definition that are code. A single fence that does not
    define it is taken as it is, and so is a text in which nothing is found.

    Args:
        text: What the model wrote, without the prompt.
        entry_point: Name of the function asked for; None where it is not known.
    """
    text = after_thinking(text).replace("\r\n", "\n")
    blocks = list(_blocks(text))
    for index, block in enumerate(blocks):
        if defines(block, entry_point):
            before = (part for part in map(_definitions, blocks[:index]) if part)
            return "\n".join([*before, block])
    found = _unfenced(text, entry_point)
    if found is not None:
        return found
    return blocks[0] if blocks else text


def defines(code: str, name: str | None) -> bool:
    """Whether source can be parsed and defines a function, class or variable at its top; any function if not named."""
    tree = _parse(code)
    if tree is None:
        return False
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and name in (None, node.name):
            return True
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.ImportFrom)) and name in _bound(node):
            return True
    return False


def function_program(prompt: str, text: str, entry_point: str, test: str) -> str:
    """HumanEval: a function of which the prompt gives signature and docstring, and its test behind it.

    The answer may hold the function, or its body alone. The prompt stands first in any case: it may import names and
    define helpers.
    """
    code = extract_code(text, entry_point)
    if defines(code, entry_point):
        solution = f"{prompt}\n    pass\n\n{code}"
    else:
        raw = after_thinking(text).replace("\r\n", "\n")
        solution = prompt + _body(prompt, [*_blocks(raw, keep_indent=True), raw])
    return f"{solution}\n\n{test}\ncheck({entry_point})\n"


def assertions_program(text: str, tests: Sequence[str], setup: str = "") -> str:
    """MBPP: whatever the answer defines, and assertions about it.

    Assertions may call a module of the standard library (`math.isclose`) that nobody imports: such ones are imported
    behind the answer, which gains nothing by it.
    """
    code = extract_code(text, name_under_test(tests))
    named = {node.id for test in tests for node in _walk(test) if isinstance(node, ast.Name)}
    imports = (f"import {name}" for name in sorted(named & sys.stdlib_module_names) if not defines(code, name))
    return "\n".join([setup, code, "", *imports, *tests, ""])


def name_under_test(tests: Sequence[str]) -> str | None:
    """The function that assertions are about: the first called name that is neither built in nor imported there."""
    counts: dict[str, int] = {}
    for test in tests:
        for node in _walk(test):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id):
                counts[node.func.id] = counts.get(node.func.id, 0) + 1
    return max(counts, key=lambda name: counts[name], default=None)


def _blocks(text: str, *, keep_indent: bool = False) -> Iterator[str]:
    """The fenced blocks of a text that are Python or do not say; one that is not closed goes on to the end."""
    mark, language = "", ""
    lines: list[str] = []
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if not mark:
            if found:
                mark, language, lines = found["mark"], found["language"].lower(), []
        elif line.strip() and line.strip().strip(mark[0]) == "" and len(line.strip()) >= len(mark):
            if language in _PYTHON:
                yield _block(lines, keep_indent)
            mark = ""
        else:
            lines.append(line)
    if mark and language in _PYTHON and lines:
        yield _longest(lines) if not keep_indent and _longest(lines) else _block(lines, keep_indent)


def _block(lines: list[str], keep_indent: bool) -> str:
    text = "\n".join(lines)
    return text if keep_indent else textwrap.dedent(text)


def _unfenced(text: str, entry_point: str | None) -> str | None:
    """The lines around a definition that are code, in a text without (useful) fences."""
    lines = [line for line in text.split("\n")[:_LONGEST] if not _FENCE.match(line)]
    name = re.escape(entry_point) if entry_point else r"\w+"
    start = next((i for i, line in enumerate(lines) if re.match(rf"[ \t]*(async\s+)?def\s+{name}\b", line)), None)
    if start is None:
        return None
    indent = len(lines[start]) - len(lines[start].lstrip())
    lines = [line[indent:] if not line[:indent].strip() else line for line in lines]
    first, last = start, start + 1
    while first > 0 and _may_be_code(lines[first - 1]):
        first -= 1
    while last < len(lines) and _may_be_code(lines[last]):
        last += 1
    for begin in range(first, start + 1):
        code = _longest(lines[begin:last], at_least=start - begin + 1)
        if code and defines(code, entry_point):
            return code
    return None


def _may_be_code(line: str) -> bool:
    return not line.strip() or line[0] in " \t" or _CODE.match(line) is not None


def _longest(lines: list[str], at_least: int = 1) -> str:
    """The longest beginning of lines that can be parsed, or nothing."""
    lines = textwrap.dedent("\n".join(lines)).split("\n")
    end = len(lines)
    while end >= at_least:
        code = "\n".join(lines[:end])
        try:
            ast.parse(code)
        except SyntaxError as error:
            # What is wrong in one line is wrong however many follow it.
            end = min(end - 1, (error.lineno or end) - 1)
            continue
        except (ValueError, RecursionError, MemoryError):
            end -= 1
            continue
        if code.strip():
            return code
        end -= 1
    return ""


def _body(prompt: str, candidates: Sequence[str]) -> str:
    """The body of the function that a prompt begins, out of the texts that may be it."""
    for candidate in candidates:
        lines = candidate.strip("\n").split("\n")
        end = next((i for i, line in enumerate(lines) if i and line.strip() and line[0] not in " \t"), len(lines))
        first_only = ["    " + lines[0].lstrip(), *lines[1:end]]
        dedented = textwrap.indent(textwrap.dedent(candidate.strip("\n")), "    ").split("\n")
        bodies = [_longest_body(prompt, variant) for variant in (lines[:end], first_only, dedented)]
        if any(bodies):
            return max(bodies, key=lambda body: body.count("\n"))
    return candidates[-1]


def _longest_body(prompt: str, lines: list[str]) -> str:
    """The longest beginning of indented lines that goes on with the prompt, or nothing."""
    for last in range(len(lines), 0, -1):
        body = "\n".join(lines[:last]).rstrip() + "\n"
        if body.strip() and _parse("if 1:\n" + body) is not None and _parse(prompt + body) is not None:
            return body
    return ""


def _definitions(code: str) -> str:
    """What a block defines and imports, without what it merely does."""
    tree = _parse(code)
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    try:
        return "\n".join(ast.unparse(node) for node in tree.body if isinstance(node, kinds)) if tree is not None else ""
    except RecursionError:
        return ""


def _bound(node: ast.Assign | ast.AnnAssign | ast.ImportFrom) -> set[str | None]:
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _walk(code: str) -> Iterator[ast.AST]:
    return ast.walk(_parse(code) or ast.Module(body=[], type_ignores=[]))


def _parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
