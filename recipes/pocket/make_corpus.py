# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Turns functions of permissively licensed Python code into a chat corpus for the pocket target.

One row is one function: the question gives its name, its arguments and the first sentence of its docstring; the
thinking is a plan read off the syntax tree; the answer is the source, normalised (`ast.unparse`: no comments,
docstring, decorators or type annotations). Functions are split by a hash of their body, so no body is in two splits:

    train        what the pocket target learns from
    prompts      never trained on; the pocket target answers them, and the answers train a drafter
    heldout      never trained on; the pocket target answers them, and a drafter is judged on them

Run (the wheels are fetched once, about 200 MB; only .py files inside them are read, nothing is installed):

    python recipes/pocket/make_corpus.py --work .pocket
"""

import argparse
import ast
import gzip
import hashlib
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm


# Name, version, licence. The standard library (PSF-2.0) of the running interpreter comes on top.
PACKAGES = [
    ("aiohttp", "3.14.5", "Apache-2.0 AND MIT"),
    ("astropy", "8.0.2", "BSD-3-Clause"),
    ("bokeh", "3.9.2", "BSD-3-Clause"),
    ("botocore", "1.44.8", "Apache-2.0"),
    ("celery", "5.7.0", "BSD-3-Clause"),
    ("dask", "2026.8.0", "BSD-3-Clause"),
    ("distributed", "2026.8.0", "BSD-3-Clause"),
    ("django", "5.2.19", "BSD-3-Clause"),
    ("ipython", "9.18.1", "BSD-3-Clause"),
    ("jax", "0.10.2", "Apache-2.0"),
    ("keras", "3.15.1", "Apache-2.0"),
    ("mne", "1.13.2", "BSD-3-Clause"),
    ("more-itertools", "11.2.1", "MIT"),
    ("moto", "5.2.5", "Apache-2.0"),
    ("networkx", "3.6.1", "BSD-3-Clause"),
    ("nltk", "3.10.4", "Apache-2.0"),
    ("pandas", "3.1.1", "BSD-3-Clause"),
    ("pyomo", "6.10.1", "BSD-3-Clause"),
    ("qiskit", "2.6.2", "Apache-2.0"),
    ("scikit-image", "0.26.0", "BSD-3-Clause"),
    ("scikit-learn", "1.9.1", "BSD-3-Clause"),
    ("scipy", "1.17.1", "BSD-3-Clause"),
    ("sphinx", "9.0.4", "BSD-2-Clause"),
    ("sqlalchemy", "2.1.9", "MIT"),
    ("statsmodels", "0.15.0", "BSD-3-Clause"),
    ("sympy", "1.14.0", "BSD-3-Clause"),
    ("tornado", "6.6.1", "Apache-2.0"),
    ("transformers", "5.24.0", "Apache-2.0"),
    ("twisted", "26.10.0", "MIT"),
    ("xarray", "2026.9.0", "Apache-2.0"),
]

# Other people's code inside a package may carry another licence, and tests are long rows of near-equal lines.
SKIPPED_FOLDERS = {
    "tests", "test", "testing", "_testing", "idlelib", "lib2to3", "site-packages", "vendor", "vendored", "_vendor", "extern", "externals",
    "_external", "external", "array_api_compat", "array_api_extra", "ensurepip", "turtledemo", "_vendored", "_bundled",
}  # fmt: skip
FOREIGN_LICENCE = re.compile(r"\b[AL]?GPL|General Public License|Mozilla Public|Creative Commons", re.IGNORECASE)

MAX_CODE_CHARS = 560
MIN_CODE_CHARS = 60
MIN_ASKED_CODE_CHARS = 120  # what is only asked should need more than a line or two
MAX_CODE_LINES = 18
MAX_LINE_CHARS = 110
MAX_DOC_CHARS = 140
SPLIT_PERMILLE = {"heldout": 14, "prompts": 170}  # of the hash range; the rest is `train`

QUESTIONS = [  # with a docstring
    "Write the Python {kind} `{signature}`: {doc}",
    "Implement `{signature}` in Python. {doc}",
    "{doc} Write this as the Python {kind} `{signature}`.",
    "I need a Python {kind} `{signature}`. It should do this: {doc}",
]
BARE_QUESTIONS = [
    "Write the Python {kind} `{signature}`.",
    "Implement the Python {kind} `{signature}`.",
]  # without one: only to train on


def read_standard_library() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            yield f"python/{relative.as_posix()}", path.read_text(encoding="utf-8", errors="ignore")


def read_wheels(folder: Path) -> Iterator[tuple[str, str]]:
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(archive.namelist()):
                parts = name.split("/")
                if name.endswith(".py") and not SKIPPED_FOLDERS.intersection(parts[:-1]) and "test" not in parts[-1]:
                    yield name, archive.read(name).decode("utf-8", errors="ignore")


def download_wheels(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    have = {"-".join(path.name.split("-")[:2]).replace("_", "-").lower() for path in folder.glob("*.whl")}
    for name, version, _ in tqdm(PACKAGES, desc="wheels", unit="package"):
        if f"{name}-{version}" not in have:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*command, "-d", str(folder), f"{name}=={version}"], check=True)


class _Normalise(ast.NodeTransformer):
    """Drops docstrings, decorators and annotations, which a name and a docstring do not determine."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        node.decorator_list, node.returns, node.type_comment = [], None, None
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_arg(self, node):
        node.annotation, node.type_comment = None, None
        return node

    def visit_AnnAssign(self, node):
        self.generic_visit(node)
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)


def _short_name(node: ast.expr) -> str:
    """The last identifier of an expression: `self.a.b[0]` -> `b`."""
    while isinstance(node, (ast.Subscript, ast.Starred, ast.Await, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _describe_value(node: ast.expr | None) -> str:
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return "nothing"
    kinds = {
        ast.Tuple: "a tuple", ast.List: "a list", ast.ListComp: "a list", ast.Dict: "a dict", ast.DictComp: "a dict", ast.Set: "a set",
        ast.SetComp: "a set", ast.Compare: "a comparison", ast.BoolOp: "a condition", ast.JoinedStr: "a string", ast.Lambda: "a function",
        ast.BinOp: "an expression", ast.UnaryOp: "an expression", ast.IfExp: "one of two values", ast.GeneratorExp: "a generator",
    }  # fmt: skip
    if isinstance(node, ast.Constant):
        return {bool: f"{node.value}", str: "a string"}.get(type(node.value), "a constant")
    name = _short_name(node)
    if isinstance(node, ast.Call) and name:
        return f"the result of {name}"
    return name or kinds.get(type(node), "a value")


def _describe_statement(node: ast.stmt) -> tuple[str, str]:
    """(verb, object) of one statement of the body, for the plan."""
    if isinstance(node, ast.Return):
        return "return", _describe_value(node.value)
    if isinstance(node, ast.Raise):
        return "raise", _short_name(node.exc) if node.exc is not None else "again"
    if isinstance(node, ast.If):
        if isinstance(node.body[-1], ast.Raise):
            return "raise", f"{_short_name(node.body[-1].exc) if node.body[-1].exc else 'again'} on bad input"
        if isinstance(node.body[-1], ast.Return):
            return "return early", ""
        return "branch", ""
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return "loop over", _short_name(node.iter) or "the items"
    if isinstance(node, ast.While):
        return "loop", ""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return "open", _short_name(node.items[0].context_expr) or "a context"
    if isinstance(node, ast.Try):
        return "guard", "against errors"
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Tuple):
            return "set", _short_name(target.elts[0]) if target.elts else ""
        return "set", _short_name(target)
    if isinstance(node, ast.Expr):
        if isinstance(node.value, (ast.Yield, ast.YieldFrom)):
            return "yield", _describe_value(node.value.value)
        return "call", _short_name(node.value)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return "define", node.name
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "import", node.names[0].name.split(".")[-1]
    if isinstance(node, ast.Assert):
        return "assert", "a condition"
    return {ast.Pass: "do nothing", ast.Delete: "delete"}.get(type(node), "go on"), ""


def describe_plan(function: ast.FunctionDef | ast.AsyncFunctionDef, num_lines: int) -> str:
    """What the function does, statement by statement, in one or two short sentences."""
    steps: list[tuple[str, list[str]]] = []
    for node in function.body:
        verb, what = _describe_statement(node)
        if steps and steps[-1][0] == verb:
            if what and what not in steps[-1][1]:
                steps[-1][1].append(what)
        else:
            steps.append((verb, [what] if what else []))
    phrases = [f"{verb} {' and '.join(names[:3])}".strip() for verb, names in steps]
    first, rest = phrases[0], phrases[1:]
    text = first[0].upper() + first[1:]
    if rest:
        text += ", " + ", ".join(["then " + phrase if i == 0 else phrase for i, phrase in enumerate(rest[:6])])
    return f"{text}. That is {num_lines} lines."


def split_of(permille: int) -> str:
    for split, share in SPLIT_PERMILLE.items():
        if permille < share:
            return split
        permille -= share
    return "train"


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[a-z0-9)`'\"])\.(?:\s|$)", paragraph)[0].strip()
    sentence = sentence.replace("``", "`")
    return sentence + "." if sentence and sentence[-1].isalnum() else sentence


def _repeat_share(words: list[str], n: int = 4) -> float:
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def rows_of_source(named_source: tuple[str, str]) -> list[dict]:
    """The rows of one file; none if it names a licence that is not permissive, or it does not parse."""
    name, source = named_source
    if FOREIGN_LICENCE.search(source):
        return []
    try:
        return list(_rows_of_tree(name, ast.parse(source)))
    except (SyntaxError, ValueError):
        return []


def _rows_of_tree(name: str, tree: ast.Module) -> Iterator[dict]:
    candidates = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            candidates.append((node, None))
        elif isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    candidates.append((child, node.name))
    for node, class_name in candidates:
        docstring = ast.get_docstring(node)
        doc = _first_sentence(docstring) if docstring else ""
        if not 12 <= len(doc) <= MAX_DOC_CHARS:
            doc = ""
        function = ast.fix_missing_locations(_Normalise().visit(node))
        if isinstance(function.body[0], (ast.Pass, ast.Raise)) and len(function.body) == 1:
            continue
        code = ast.unparse(function)
        lines = code.splitlines()
        if not (MIN_CODE_CHARS <= len(code) <= MAX_CODE_CHARS and 2 <= len(lines) <= MAX_CODE_LINES):
            continue
        if (
            max(map(len, lines)) > MAX_LINE_CHARS
            or not (code + doc).isascii()
            or re.search(r"\d{6,}|\\x|[A-Za-z0-9+/]{40,}", code)
        ):
            continue
        if _repeat_share(re.findall(r"\w+|[^\w\s]", code)) > 0.2:
            continue
        signature = f"{function.name}({ast.unparse(function.args)})"
        if len(signature) > 120:
            continue
        body = "\n".join(ast.unparse(statement) for statement in function.body)
        digest = hashlib.sha256(body.encode()).hexdigest()
        pick = int(digest[:8], 16)
        kind = f"method of `{class_name}`" if class_name else "function"
        forms = QUESTIONS if doc else BARE_QUESTIONS
        question = forms[pick % len(forms)].format(kind=kind, signature=signature, doc=doc)
        permille = pick // len(QUESTIONS) % 1000
        split = split_of(permille)
        if split != "train" and (not doc or len(code) < MIN_ASKED_CODE_CHARS):
            continue
        yield {
            "id": digest[:12],
            "source": name,
            "split": split,
            "thinks": (pick // 7) % 100 < 85,
            "question": question,
            "plan": describe_plan(function, len(lines)),
            "code": code,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is not shipped")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    download_wheels(args.work / "wheels")
    rows: dict[str, dict] = {}
    questions: set[str] = set()
    sources = itertools.chain(read_standard_library(), read_wheels(args.work / "wheels"))
    with multiprocessing.Pool(args.processes) as pool:
        for found in tqdm(pool.imap(rows_of_source, sources, chunksize=16), desc="functions", unit="file"):
            for row in found:
                if row["id"] not in rows and row["question"] not in questions:
                    rows[row["id"]] = row
                    questions.add(row["question"])
    if not rows:
        raise SystemExit("no function was found: is this interpreter's standard library readable?")
    path = args.work / "corpus.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for key in sorted(rows):
            file.write(json.dumps(rows[key]) + "\n")
    print(f"{len(rows)} functions -> {path}", dict(Counter(row["split"] for row in rows.values())))
    print("by source", Counter(row["source"].split("/")[0] for row in rows.values()).most_common(40))
    print("characters of code", sum(len(row["code"]) for row in rows.values()))


if __name__ == "__main__":
    main()
