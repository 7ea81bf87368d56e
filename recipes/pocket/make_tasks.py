# Copyright 2026 The hf_dflash Authors. All rights reserved.
# Licensed under the Apache License, Version 2.0; see the LICENSE file.
"""Small chores of a programmer's day with one right answer each: the second half of the pocket target's corpus.

The functions of make_corpus.py teach it what code looks like, but nobody could know a body from its name; these chores
say all that the answer needs, so the target can be sure of what it writes, as a large target is of much of its text.
Every row is drawn from the word lists below with its own seed; rows are split by a hash, so no question is in two splits.

    python recipes/pocket/make_tasks.py --work .pocket      # tasks.jsonl.gz, seconds
"""

import argparse
import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm


NUM_ROWS = 80_000
SPLIT_PERMILLE = {"heldout": 4, "prompts": 54}  # as many as functions are asked for; the rest is `train`
MAX_ANSWER_CHARS = 620

THINGS = """account address album animal answer article asset author badge basket battery bill block board book bottle bridge
budget building button cable camera campaign card cart catalog channel chapter chart city client color column comment company
contact contract country coupon course customer deal device document driver editor engine event example farm field file flight
folder forest game garden grade group guest hotel house image invoice island item journal key kitchen label lamp language
lesson letter library license list location machine map market meeting member menu message meter movie network note office
option order package page painting parcel park partner payment person phone photo piano place plan planet plant player poem
point policy post price printer product profile project question recipe record region report request review ring river road
robot room rule sample school score screen season section seller sensor server service session ship shop signal song source
stage station stock store story street student subject supplier table task teacher team ticket token tool topic tower town
track train tree trip truck user vehicle vendor version video village visit voucher wallet warehouse weather wheel window
winner worker writer zone""".split()

FIELDS = {
    "str": """name title city street email phone label color country status code brand language comment category author owner
unit slug model summary currency region vendor note role kind source path key""".split(),
    "int": """number year age count size width height depth level rank stock floor rooms pages score lines port
quantity position version points index seats weight duration capacity limit""".split(),
    "float": """price rating rate ratio total balance distance speed share discount tax amount latitude longitude
temperature volume length area profit cost""".split(),
    "bool": "active visible paid public enabled locked open ready checked deleted shipped online".split(),
}
SQL_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL", "bool": "BOOLEAN"}
VALUES = """red green blue amber silver north south east west small large plain round early late open closed fresh dry warm
cold fast slow light heavy oak pine maple cedar iron steel glass paper stone sand coral pearl lemon mint olive peach""".split()
VERBS = """load save send read write open close start stop update delete create print check count merge split copy move sort
filter parse render format import export publish archive restore compare""".split()


def split_of(permille: int) -> str:
    if permille < SPLIT_PERMILLE["heldout"]:
        return "heldout"
    return "prompts" if permille < sum(SPLIT_PERMILLE.values()) else "train"


def a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def plural(word: str) -> str:
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    return word[:-1] + "ies" if word[-1] == "y" and word[-2] not in "aeiou" else word + "s"


def fence(language: str, code: str) -> str:
    return f"```{language}\n{code}\n```"


def draw_fields(rng: random.Random, low: int, high: int) -> list[tuple[str, str]]:
    """Names with their types."""
    pairs = [(name, kind) for kind, names in FIELDS.items() for name in names]
    return rng.sample(pairs, rng.randint(low, high))


def draw_value(rng: random.Random, kind: str):
    if kind == "int":
        return rng.randint(1, 99)
    if kind == "float":
        return rng.randint(1, 99) / 2
    return rng.random() < 0.5 if kind == "bool" else rng.choice(VALUES)


def describe(fields: list[tuple[str, str]]) -> str:
    return listed([f"{name} ({kind})" for name, kind in fields])


# Each chore: rng -> (question, plan, answer). The question says all that the answer needs.


def plain_class(rng):
    name, fields = rng.choice(THINGS).capitalize(), draw_fields(rng, 2, 4)
    method = rng.choice(["to_dict", "__repr__", "__eq__", None])
    names = [field for field, _ in fields]
    code = [f"class {name}:", f"    def __init__(self, {', '.join(names)}):"]
    code += [f"        self.{field} = {field}" for field in names]
    if method == "to_dict":
        pairs = ", ".join(f"'{field}': self.{field}" for field in names)
        code += ["", "    def to_dict(self):", f"        return {{{pairs}}}"]
    elif method == "__repr__":
        shown = ", ".join(f"{field}={{self.{field}!r}}" for field in names)
        code += ["", "    def __repr__(self):", f"        return f'{name}({shown})'"]
    elif method == "__eq__":
        same = " and ".join(f"self.{field} == other.{field}" for field in names)
        code += ["", "    def __eq__(self, other):", f"        return {same}"]
    extra = f" and a `{method}` method" if method else ""
    question = rng.choice(
        [
            f"Write a Python class `{name}` with the fields {listed(names)}{extra}.",
            f"I need a class `{name}` in Python. Fields: {', '.join(names)}.{f' Add `{method}`.' if method else ''}",
        ]
    )
    plan = f"The class {name} keeps {listed(names)}." + (f" After the constructor comes {method}." if method else "")
    return question, plan, fence("python", "\n".join(code))


def data_class(rng):
    name, fields = rng.choice(THINGS).capitalize(), draw_fields(rng, 3, 6)
    code = ["@dataclass", f"class {name}:"] + [f"    {field}: {kind}" for field, kind in fields]
    question = rng.choice(
        [f"Make `{name}` a dataclass with {describe(fields)}.", f"Write the dataclass `{name}`: {describe(fields)}."]
    )
    plan = f"A dataclass with {len(fields)} fields, in the order given."
    return question, plan, fence("python", "from dataclasses import dataclass\n\n\n" + "\n".join(code))


def sql_table(rng):
    table, fields = plural(rng.choice(THINGS)), draw_fields(rng, 3, 6)
    rows = ["    id INTEGER PRIMARY KEY"] + [f"    {field} {SQL_TYPES[kind]} NOT NULL" for field, kind in fields]
    question = rng.choice(
        [f"Write the SQL that creates the table {table} with {describe(fields)}.",
         f"Create a table `{table}` in SQL. Columns: {describe(fields)}."]
    )  # fmt: skip
    plan = f"One column for the key, then {len(fields)} columns: {listed([field for field, _ in fields])}."
    return question, plan, fence("sql", f"CREATE TABLE {table} (\n" + ",\n".join(rows) + "\n);")


def sql_select(rng):
    table, fields = plural(rng.choice(THINGS)), draw_fields(rng, 2, 4)
    shown = [field for field, _ in fields]
    over = rng.choice(FIELDS["int"] + FIELDS["float"])
    sign, word = rng.choice([(">", "above"), ("<", "below")])
    limit, order = rng.randint(1, 99), rng.choice(shown)
    question = rng.choice(
        [f"Select {listed(shown)} from {table} where {over} is {word} {limit}, ordered by {order}.",
         f"Write an SQL query: the {listed(shown)} of all {table} whose {over} is {word} {limit}, sorted by {order}."]
    )  # fmt: skip
    code = f"SELECT {', '.join(shown)}\nFROM {table}\nWHERE {over} {sign} {limit}\nORDER BY {order};"
    return question, f"Read {table}, keep rows with {over} {word} {limit}, sort by {order}.", fence("sql", code)


def command_line(rng):
    fields = draw_fields(rng, 2, 4)
    verb, thing = rng.choice(VERBS), plural(rng.choice(THINGS))
    code = [f"parser = argparse.ArgumentParser(description='{verb.capitalize()} {thing}.')"]
    for field, kind in fields:
        how = "action='store_true'" if kind == "bool" else f"type={kind}, required=True"
        code.append(f"parser.add_argument('--{field}', {how})")
    code.append("args = parser.parse_args()")
    question = rng.choice(
        [f"Write an argparse parser for a tool that will {verb} {thing}, with the options {describe(fields)}.",
         f"A Python script should {verb} {thing}. Give me its argparse options: {describe(fields)}."]
    )  # fmt: skip
    plan = f"A parser with {len(fields)} options: {listed([field for field, _ in fields])}. A bool is a switch."
    return question, plan, fence("python", "import argparse\n\n" + "\n".join(code))


def enumeration(rng):
    name, members = (
        rng.choice(THINGS).capitalize() + rng.choice(["Kind", "State", "Type"]),
        rng.sample(VALUES, rng.randint(3, 6)),
    )
    code = [f"class {name}(Enum):"] + [f"    {member.upper()} = '{member}'" for member in members]
    question = rng.choice(
        [f"Write a Python enum `{name}` with {listed(members)}.", f"Make an Enum called `{name}`. Members: {', '.join(members)}."]
    )  # fmt: skip
    plan = f"An Enum with {len(members)} members, each with its own name as value."
    return question, plan, fence("python", "from enum import Enum\n\n\n" + "\n".join(code))


def json_object(rng):
    thing, fields = rng.choice(THINGS), draw_fields(rng, 3, 6)
    values = {field: draw_value(rng, kind) for field, kind in fields}
    said = [f"{field} {json.dumps(value).strip(chr(34))}" for field, value in values.items()]
    question = rng.choice(
        [f"Write {a(thing)} as JSON: {listed(said)}.", f"Give me the JSON of {a(thing)} with {listed(said)}."]
    )
    return question, f"One object with {len(fields)} keys.", fence("json", json.dumps(values, indent=2))


def yaml_settings(rng):
    section, fields = rng.choice(THINGS), draw_fields(rng, 3, 6)
    values = [(field, json.dumps(draw_value(rng, kind)).strip('"')) for field, kind in fields]
    code = "\n".join([f"{section}:"] + [f"  {field}: {value}" for field, value in values])
    said = listed([f"{field} = {value}" for field, value in values])
    question = rng.choice(
        [f"Write YAML settings for the {section}: {said}.", f"Put this into a YAML section `{section}`: {said}."]
    )
    return question, f"The section {section} gets {len(fields)} lines.", fence("yaml", code)


def markdown_table(rng):
    columns = [field for field, _ in draw_fields(rng, 2, 3)]
    rows = [[rng.choice(VALUES) for _ in columns] for _ in range(rng.randint(2, 4))]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join([",".join(columns)] + [",".join(row) for row in rows])
    question = rng.choice(["Turn this CSV into a Markdown table:\n", "Make a Markdown table of these lines:\n"]) + text
    return question, f"{len(columns)} columns and {len(rows)} rows.", "\n".join(lines)


def numbered_list(rng):
    things = rng.sample(THINGS, rng.randint(4, 8))
    verb = rng.choice(VERBS)
    question = rng.choice(
        [f"Make a numbered list: {verb} the {listed(things)}, one step each.",
         f"Write one numbered step for each of {listed(things)}. Each step says to {verb} it."]
    )  # fmt: skip
    answer = "\n".join(f"{i}. {verb.capitalize()} the {thing}." for i, thing in enumerate(things, 1))
    return question, f"There are {len(things)} steps.", answer


def unit_tests(rng):
    function = f"{rng.choice(VERBS)}_{rng.choice(THINGS)}"
    cases = [(rng.randint(0, 50), rng.randint(0, 99)) for _ in range(rng.randint(2, 4))]
    code = []
    for x, y in cases:
        code += [f"def test_{function}_{x}():", f"    assert {function}({x}) == {y}", "", ""]
    said = listed([f"{function}({x}) is {y}" for x, y in cases])
    question = rng.choice([f"Write pytest tests: {said}.", f"Test `{function}` with pytest. Check that {said}."])
    return question, f"{len(cases)} tests of {function}.", fence("python", "\n".join(code[:-2]))


def snake_case(rng):
    names = [(rng.choice(VERBS), rng.choice(THINGS), rng.choice(FIELDS["str"])) for _ in range(rng.randint(3, 6))]
    camel = [first + second.capitalize() + third.capitalize() for first, second, third in names]
    question = rng.choice(["Write these names in snake case: ", "Change from camel case to snake case: "])
    lines = [f"- {name}: {'_'.join(parts)}" for name, parts in zip(camel, names, strict=True)]
    return question + ", ".join(camel) + ".", f"{len(names)} names, words joined by underscores.", "\n".join(lines)


def property_pair(rng):
    thing = rng.choice(THINGS).capitalize()
    field = rng.choice(FIELDS["int"] + FIELDS["float"])
    low = rng.randint(0, 20)
    code = f"""@property
def {field}(self):
    return self._{field}

@{field}.setter
def {field}(self, value):
    if value < {low}:
        raise ValueError('{field} must be at least {low}')
    self._{field} = value"""
    question = rng.choice(
        [f"Write a property `{field}` for the class `{thing}` whose setter refuses values below {low}.",
         f"Give `{thing}` a checked property `{field}`. It must be at least {low}."]
    )  # fmt: skip
    return question, f"A getter, then a setter that raises ValueError below {low}.", fence("python", code)


def lookup_function(rng):
    function = f"{rng.choice(FIELDS['str'])}_of_{rng.choice(THINGS)}"
    keys = rng.sample(THINGS, rng.randint(3, 5))
    pairs = [(key, rng.choice(VALUES)) for key in keys]
    table = "\n".join(f"        '{key}': '{value}'," for key, value in pairs)
    code = f"def {function}(name):\n    table = {{\n{table}\n    }}\n    return table.get(name)"
    said = listed([f"{key} gives {value}" for key, value in pairs])
    question = rng.choice(
        [f"Write a Python function `{function}(name)`: {said}.", f"Implement `{function}(name)` by a table: {said}."]
    )
    return question, f"A dict with {len(pairs)} entries, then get.", fence("python", code)


def check_function(rng):
    thing = rng.choice(THINGS)
    numbers = rng.sample(FIELDS["int"] + FIELDS["float"], rng.randint(1, 3))
    texts = rng.sample(FIELDS["str"], rng.randint(1, 2))
    code, said = [f"def check_{thing}({thing}):"], []
    for field in texts:
        code += [f"    if not {thing}.{field}:", f"        raise ValueError('{field} is empty')"]
        said.append(f"{field} is empty")
    for field in numbers:
        bound = rng.randint(1, 50)
        code += [f"    if {thing}.{field} > {bound}:", f"        raise ValueError('{field} is above {bound}')"]
        said.append(f"{field} is above {bound}")
    question = rng.choice(
        [f"Write `check_{thing}({thing})`. It raises ValueError if {listed(said)}.",
         f"I need a Python function `check_{thing}({thing})` that refuses {a(thing)} when {listed(said)}."]
    )  # fmt: skip
    return question, f"{len(said)} checks, each raises ValueError.", fence("python", "\n".join(code))


def html_form(rng):
    fields = draw_fields(rng, 2, 4)
    thing = rng.choice(THINGS)
    kinds = {"str": "text", "int": "number", "float": "number", "bool": "checkbox"}
    code = [f'<form action="/{plural(thing)}" method="post">']
    code += [f'  <input name="{field}" type="{kinds[kind]}">' for field, kind in fields]
    code += [f"  <button>Save {thing}</button>", "</form>"]
    question = rng.choice(
        [f"Write an HTML form for {a(thing)} with {describe(fields)}.", f"Make a form in HTML to save {a(thing)}: {describe(fields)}."]
    )  # fmt: skip
    plan = f"{len(fields)} inputs and a button; it posts to {plural(thing)}."
    return question, plan, fence("html", "\n".join(code))


CHORES: list[Callable[[random.Random], tuple[str, str, str]]] = [
    plain_class, data_class, sql_table, sql_select, command_line, enumeration, json_object, yaml_settings, markdown_table,
    numbered_list, unit_tests, snake_case, property_pair, lookup_function, check_function, html_form,
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything that is not shipped")
    parser.add_argument("--rows", type=int, default=NUM_ROWS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict] = {}
    for seed in tqdm(range(args.rows), desc="chores", unit="row"):
        rng = random.Random(seed)
        chore = rng.choice(CHORES)
        question, plan, answer = chore(rng)
        digest = hashlib.sha256(question.encode()).hexdigest()
        pick = int(digest[:8], 16)
        if len(answer) <= MAX_ANSWER_CHARS:
            rows[digest[:12]] = {
                "id": digest[:12],
                "source": f"chores/{chore.__name__}",
                "split": split_of(pick % 1000),
                "thinks": (pick // 7000) % 100 < 85,
                "question": question,
                "plan": plan,
                "answer": answer,
            }
    path = args.work / "tasks.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for key in sorted(rows):
            file.write(json.dumps(rows[key]) + "\n")
    print(f"{len(rows)} chores -> {path}", dict(Counter(row["split"] for row in rows.values())))
    print("by chore", Counter(row["source"].split("/")[1] for row in rows.values()).most_common())
    print("characters of answers", sum(len(row["answer"]) for row in rows.values()))


if __name__ == "__main__":
    main()
