"""Programming problems with tests, and programs that a model wrote for them: HumanEval, MBPP, APPS, CodeContests and
files of samples.

A file in its standard layout in, tuples out. Nothing is executed here.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from rl.files import json_rows

T = TypeVar("T")


class Problem(NamedTuple):
    """What a program shall do, in words and as tests."""

    name: str
    prompt: str  # what a language model is given
    tests: str  # Python that asserts; it runs beside the program, not inside it (`rl.programs.worker`)
    entry: tuple[str, ...]  # the names in `tests` that the program defines
    reference: str  # a program, said to be right; empty: there is none
    # Of a program that reads and prints: inputs and the outputs expected, in place of tests
    cases: tuple[tuple[str, str], ...] = ()
    match: str = "words"  # how outputs are compared: one of `rl.programs.outputs.MATCHES`
    # Statements that are executed before a program whose text has their last word; a module may be missing
    imports: tuple[str, ...] = ()


class Samples(NamedTuple):
    """Programs that were written for one problem; a program's text is ``prompt + completion``."""

    name: str  # of the problem
    prompt: str
    completions: tuple[str, ...]


MBPP_SPLITS: Mapping[str, range] = MappingProxyType(
    {
        "prompt": range(1, 11),
        "test": range(11, 511),
        "validation": range(511, 601),
        "train": range(601, 975),
    }
)
"""The task ids of each split (Austin et al. 2021)."""


def read_humaneval(path: str | Path) -> list[Problem]:
    """The problems of ``HumanEval.jsonl`` or ``HumanEval.jsonl.gz`` (Chen et al. 2021), in the file's order.

    A program is the prompt followed by a completion. Where the prompt defines other functions beside the one to be
    completed, the tests have their own copy of them.

    Raises:
        ValueError: the file is not in that layout, or a problem's prompt or tests do not compile or test nothing; the
            message names the file and the problem.
    """
    rows = _rows(path, "task_id", "prompt", "entry_point", "test")
    return [_parse_row(place, _humaneval_problem, row) for place, row in rows]


def read_mbpp(path: str | Path, split: str | None = None) -> list[Problem]:
    """The problems of ``mbpp.jsonl`` or ``sanitized-mbpp.json`` (Austin et al. 2021), in the file's order.

    The prompt is a docstring of the task's text and its assertions, as there.

    Args:
        path: either file.
        split: one of `MBPP_SPLITS`; by default all.

    Raises:
        ValueError: the file is not in that layout, a problem's program or tests do not compile or test nothing, or
            the split is unknown; the message names the file and the problem.
    """
    if split is not None and split not in MBPP_SPLITS:
        raise ValueError(f"MBPP has no split {split!r}, but {', '.join(MBPP_SPLITS)}")
    rows = _rows(path, "task_id", "code", "test_list")
    numbers = MBPP_SPLITS.get(split or "")
    return [
        _parse_row(place, _mbpp_problem, row)
        for place, row in rows
        if numbers is None or _parse_row(place, _mbpp_number, row) in numbers
    ]


def read_apps(path: str | Path) -> list[Problem]:
    """The problems of APPS (Hendrycks et al. 2021), ``train.jsonl`` or ``test.jsonl``, in the file's order.

    Those whose ``input_output`` names a function test it by calls, the others by inputs and outputs, compared line by
    line. (APPS' own harness takes lines and words in any order as well, and of several values that a call should return
    the first alone, and so passes wrong programs.) As there, some modules and their names are imported before a
    program, and dictionaries that go in or come out have integers for keys where JSON has texts of them. The prompt is
    a docstring of the question and the code to start from; the first solution is the reference.

    Raises:
        ValueError: the file is not in that layout; the message names the file and the problem.

    Warns:
        UserWarning: problems without tests, which are left out.
    """
    return _tested(path, _apps_problem, "question", "input_output")


def read_code_contests(path: str | Path) -> list[Problem]:
    """The problems of CodeContests (Li et al. 2022) as JSON lines of the fields of its records, in the file's order.

    All its tests are used, public, private and generated; outputs are compared word by word. The prompt is a docstring
    of the description; the first solution in Python 3 is the reference. Problems that read files are left out.

    Raises:
        ValueError: the file is not in that layout; the message names the file and the problem.

    Warns:
        UserWarning: problems without tests, which are left out.
    """
    return _tested(path, _code_contests_problem, "name", "description", "public_tests")


def read_samples(path: str | Path) -> list[Samples]:
    """Sampled programs in the layout of CodeT (Chen et al. 2022): JSON lines of task_id, prompt and samples.

    Raises:
        ValueError: the file is not in that layout.
    """
    rows = _rows(path, "task_id", "prompt", "samples")
    return [_parse_row(place, _samples, row) for place, row in rows]


def check(problem: Problem) -> None:
    """Do nothing if the problem's tests can tell programs apart, as far as their text says.

    An assertion behind a condition that never holds is not noticed. Inputs and outputs can always.

    Raises:
        ValueError: they do not compile, or no assertion in them can be reached, so that any program would pass.
    """
    if problem.cases:
        return
    tree = _parse(problem.tests, "tests", problem.name)
    if not any(isinstance(node, ast.Assert) for node in _reached(tree)):
        raise ValueError(
            f"problem {problem.name!r} has no tests: there is no assert statement in them, or only in functions that "
            "nothing calls"
        )


def asks_for_a_class(problem: Problem) -> bool:
    """Whether a name that the tests take from a program is a class in the reference, of which they have instances.

    ``Solution().f(x)`` asks for what a method returns (APPS' calls), which is compared as that of a function is.
    Programs that read and print are asked for none.
    """
    if problem.cases:
        return False
    try:
        reference = _parse(problem.reference, "reference", problem.name)
        tests = list(ast.walk(_parse(problem.tests, "tests", problem.name)))
    except ValueError:
        return False
    classes = {node.name for node in reference.body if isinstance(node, ast.ClassDef)} & {*problem.entry}
    named = [node for node in tests if isinstance(node, ast.Name) and node.id in classes]
    methods = [
        node.func.value.func
        for node in tests
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Call)
    ]
    return any(node not in methods for node in named)


def _parse_row(place: str, make: Callable[[Mapping[str, Any]], T], row: Mapping[str, Any]) -> T:
    try:
        return make(row)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # but for the last: of another layout within
        error = ValueError(f"{error} is missing") if isinstance(error, KeyError) else error
        name = next((row[key] for key in _NAMES if key in row), "without a name")
        raise ValueError(f"{place}, task {name!r}: {error}") from None


def _samples(row: Mapping[str, Any]) -> Samples:
    samples = row["samples"]
    if not isinstance(samples, list) or not all(isinstance(text, str) for text in samples):
        raise ValueError(f"its samples are no list of texts, but {json.dumps(samples)[:40]}")
    if not isinstance(row["prompt"], str):
        raise ValueError(f"its prompt is no text, but {json.dumps(row['prompt'])[:40]}")
    return Samples(row["task_id"], row["prompt"], tuple(samples))


def _humaneval_problem(row: Mapping[str, Any]) -> Problem:
    name, entry = row["task_id"], row["entry_point"]
    if not isinstance(entry, str) or not entry.isidentifier():
        raise ValueError(f"its entry_point is {entry!r}, not the name of a function")
    statements = _parse(row["prompt"], "prompt", name).body
    helpers = [node for node in statements if getattr(node, "name", None) != entry]
    tests = f"{ast.unparse(ast.Module(helpers, []))}\n{row['test']}\ncheck({entry})\n"
    reference = row["prompt"] + row["canonical_solution"] if "canonical_solution" in row else ""
    return _checked(Problem(name, row["prompt"], tests, (entry,), reference))


def _mbpp_number(row: Mapping[str, Any]) -> int:
    if type(row["task_id"]) is not int:
        raise ValueError("its task_id is no whole number, by which the splits are told apart")
    return row["task_id"]


def _mbpp_problem(row: Mapping[str, Any]) -> Problem:
    name = f"MBPP/{row['task_id']}"
    assertions = "\n".join(row["test_list"])
    setup = row.get("test_setup_code", "")
    tests = "\n".join([*row.get("test_imports", ()), setup, assertions]).replace("\r\n", "\n")
    reference = row["code"].replace("\r\n", "\n")
    imports, entry = _imports_and_entry(_parse(reference, "code", name), _parse(tests, "tests", name))
    prompt = _mbpp_prompt(f"{row.get('prompt', row.get('text', ''))}\n{assertions}")
    return _checked(Problem(name, prompt, "\n".join([*imports, tests]), entry, reference))


def _mbpp_prompt(text: str) -> str:
    """A docstring as published, or a raw one where that is no Python: programs go on behind it."""
    prompt = f'"""\n{text}\n"""\n'
    try:
        _parse(prompt, "prompt", "")
    except ValueError:
        return _docstring(text, "")
    return prompt


def _tested(
    path: str | Path, make: Callable[[Mapping[str, Any]], Problem | None], *keys: str
) -> list[Problem]:
    """The problems that have tests."""
    problems = [_parse_row(place, make, row) for place, row in _rows(path, *keys)]
    tested = [problem for problem in problems if problem is not None]
    if len(tested) < len(problems):
        warnings.warn(
            f"{path}: {len(problems) - len(tested)} of {len(problems)} problems have no tests that can be run: "
            "left out",
            stacklevel=3,
        )
    return tested


def _apps_problem(row: Mapping[str, Any]) -> Problem | None:
    number = next((row[key] for key in _NAMES if key in row), None)
    if number is None:
        raise ValueError(f"it has no name: none of {', '.join(_NAMES)}")
    name = f"APPS/{number}"
    tests = _inner_json(row["input_output"], "input_output") or {}
    if not tests.get("inputs"):
        return None
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
    start = row.get("starter_code") or ""
    solutions = _inner_json(row.get("solutions") or "[]", "solutions")
    reference = solutions[0] if solutions else ""
    text = _docstring(row["question"], start)
    function = tests.get("fn_name")
    if function is None:
        cases = tuple((_lines(stdin), _lines(expected)) for stdin, expected in pairs)
        return Problem(name, text, "", (), reference, cases, "lines", _APPS_IMPORTS)
    owner = "Solution" if "class Solution" in (start or reference) else ""
    called = f"Solution().{function}" if owner else function
    calls = [
        f"assert same({called}(*{_whole_keys(arguments)!r}), {_whole_keys(expected)!r})"
        for arguments, expected in pairs
    ]
    tests = "\n".join([_SAME, *calls])
    return _checked(Problem(name, text, tests, (owner or function,), reference, imports=_APPS_IMPORTS))


def _code_contests_problem(row: Mapping[str, Any]) -> Problem | None:
    kinds = ("public_tests", "private_tests", "generated_tests")
    cases = tuple(
        (_text(one["input"], "input"), _text(one["output"], "output"))
        for kind in kinds
        for one in _records(row.get(kind) or [])
    )
    if not cases or row.get("input_file"):
        return None
    solutions = [
        one["solution"] for one in _records(row.get("solutions") or []) if one["language"] in (3, "PYTHON3")
    ]
    return Problem(
        row["name"], _docstring(row["description"], ""), "", (), next(iter(solutions), ""), cases, "words"
    )


def _records(column: Any) -> list[Mapping[str, Any]]:
    """Rows of a list of objects, or of an object of lists, as different exports have them."""
    if isinstance(column, Mapping):
        return [dict(zip(column, values, strict=True)) for values in zip(*column.values(), strict=True)]
    return list(column)


def _docstring(question: str, start: str) -> str:
    """What a program can begin with: raw, because questions have formulas."""
    text = "\n\n".join([_text(question, "question").strip(), *([start.strip()] if start else [])])
    prompt = 'r"""\n' + text.replace('"""', "'''") + '\n"""\n'
    try:
        ast.parse(prompt)
    except (SyntaxError, ValueError) as error:  # null bytes, and halves of characters
        raise ValueError(f"no Python program can begin with its text: {error}") from None
    return prompt


def _lines(value: Any) -> str:
    """A text, for which APPS sometimes has a list of its lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else _text(value, "input or output")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"its {what} is no text, but {json.dumps(value)[:40]}")
    return value


def _inner_json(text: Any, what: str) -> Any:
    """What a field says, which is JSON in a text; nothing at all is empty."""
    try:
        return json.loads(text) if isinstance(text, str) and text.strip() else text or None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its {what} is no JSON: {error}") from None
    except ValueError as error:  # JSON, with an integer of more digits than Python reads
        raise ValueError(f"its {what} cannot be read: {error}") from None


def _whole_keys(value: Any) -> Any:
    """A dictionary, or a list that begins with one, whose keys are integers again: JSON made texts of them."""
    if isinstance(value, list):
        return [*map(_whole_keys, value[:1]), *value[1:]] if value and isinstance(value[0], dict) else value
    try:
        return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
    except ValueError:
        return value


# What APPS' harness imports before every program (hendrycks/apps, eval/testing_util.py).
_APPS_NAMES = {
    "collections": "Counter OrderedDict deque defaultdict ChainMap",
    "functools": "lru_cache",
    "heapq": "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest",
    "itertools": "accumulate product permutations combinations",
    "math": "sqrt sin cos tan ceil fabs floor gcd exp log log2",
    "typing": "List Tuple",
}
_APPS_IMPORTS = (
    *(f"import {module}" for module in ("collections", "fractions", "heapq", "itertools")),
    *(f"import {module}" for module in ("math", "random", "sys", "time")),
    *(f"from {module} import {name}" for module, names in _APPS_NAMES.items() for name in names.split()),
    "import numpy as np",
)
# APPS: what is expected has lists for tuples, and may be the one item of a list. Its harness takes the first of several
# for all of them, and so passes wrong programs.
_SAME = """def same(actual, expected):
    def plain(value):
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
    actual = plain(actual)
    return actual == expected or isinstance(expected, list) and len(expected) == 1 and actual == expected[0]
"""
_NAMES = ("task_id", "problem_id", "id", "name")


def _imports_and_entry(reference: ast.Module, tests: ast.Module) -> tuple[list[str], tuple[str, ...]]:
    """Of the names that the tests use: the imports that bring some, and those that the reference program defines."""
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    used -= {name for node in tests.body for name in _defined(node)}
    imports, entry = [], []
    for node in reference.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            entry += sorted(_defined(node) & used)
        elif used & {alias.asname or alias.name for alias in node.names}:
            imports.append(ast.unparse(node))
    return imports, tuple(dict.fromkeys(entry))


def _defined(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement binds; imports aside."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    nodes = ast.walk(statement)
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _reached(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that can be executed: the body of a function only if something that can be executed names it."""
    named: set[Any] = set()
    bodies: dict[str, list[ast.stmt]] = {}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        body: list[ast.stmt] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body
            bodies[node.name] = [*bodies.get(node.name, ()), *body]
        waiting += [child for child in ast.iter_child_nodes(node) if child not in body]
        # As a name, an attribute, or a text with which it is looked up.
        named |= {getattr(node, field, None) for field in ("id", "attr", "value")}
        for name in [name for name in bodies if name in named or name.startswith("__")]:
            waiting += bodies.pop(name)


def _parse(source: str, what: str, problem: str) -> ast.Module:
    with warnings.catch_warnings():  # about escapes in strings that others wrote
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError) as error:  # the second for null bytes
            raise ValueError(f"the {what} of problem {problem!r} will not compile: {error}") from None


def _checked(problem: Problem) -> Problem:
    check(problem)
    return problem


def _rows(path: str | Path, *keys: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each row of a file is, and what it has. Raises ValueError where it lacks one of ``keys``."""
    for place, _, row in json_rows(path, arrays=True):
        missing = [key for key in keys if not isinstance(row, Mapping) or key not in row]
        if missing:
            raise ValueError(f"{place} has no {', '.join(missing)}")
        yield place, row
