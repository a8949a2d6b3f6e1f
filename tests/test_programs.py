"""rl.programs: verdicts by hand, and programs that try to get out, to hang, or to be taken for right."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl.programs import kernel, wire, worker
from rl.programs import pool as pools
from rl.programs.outputs import MATCHES
from rl.programs.pool import REWARDS, IsolationError, Limits, Pool, Verdict
from rl.programs.problems import (
    MBPP_SPLITS,
    Problem,
    check,
    read_apps,
    read_code_contests,
    read_humaneval,
    read_mbpp,
    read_samples,
)

LIMITS = Limits(seconds=1, memory=256 << 20, output=1 << 20)
ADD = Problem("add", "", "assert add(1, 2) == 3\nassert add(2, 2) == 4", ("add",), "")
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"


def available(isolation: str) -> bool:
    try:
        Pool(1, isolation=isolation).close()
    except IsolationError:
        return False
    return True


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces", "none"])
def anywhere(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool of one worker, for what holds without isolation too."""
    if not available(request.param):
        pytest.skip(f"{request.param} does not work here")
    with Pool(1, limits=LIMITS, isolation=request.param) as pool:
        yield pool


@pytest.fixture
def isolated(anywhere: Pool) -> Pool:
    if anywhere.isolation == "none":
        pytest.skip("this needs isolation")
    return anywhere


def verdict(pool: Pool, program: str, problem: Problem = ADD) -> Verdict:
    return pool.run([(problem, textwrap.dedent(program))])[0]


def observes(pool: Pool, probe: str, expected: object) -> None:
    """The program's ``probe()`` returns ``expected``: that is what it sees from where it runs."""
    problem = Problem("probe", "", f"assert probe() == {expected!r}", ("probe",), "")
    assert verdict(pool, probe, problem) == Verdict.PASSED


# ---- verdicts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (RIGHT, Verdict.PASSED),
        ("add = lambda a, b: b + a", Verdict.PASSED),
        (WRONG, Verdict.FAILED),
        ("def add(a, b):\n    return str(a + b)", Verdict.FAILED),
        ("def add(a, b):\n    pass", Verdict.FAILED),
        ("def add(a, b) return a + b", Verdict.COMPILE_ERROR),
        ("def add(a, b):\nreturn a + b", Verdict.COMPILE_ERROR),
        (RIGHT + "\0", Verdict.COMPILE_ERROR),
        ("(" * 500 + ")" * 500, Verdict.COMPILE_ERROR),
        ("def add(a, b):\n    return a + c", Verdict.RUNTIME_ERROR),
        ("def add(a):\n    return a", Verdict.RUNTIME_ERROR),
        ("def sub(a, b):\n    return a + b", Verdict.RUNTIME_ERROR),
        ("", Verdict.RUNTIME_ERROR),
        (RIGHT + "assert False", Verdict.RUNTIME_ERROR),
        ("def add(a, b):\n    return add(a, b)", Verdict.RUNTIME_ERROR),
        (RIGHT + "input()", Verdict.RUNTIME_ERROR),
        (RIGHT + "if __name__ == '__main__':\n    1 / 0", Verdict.PASSED),
        (RIGHT + "import no_such_module", Verdict.RUNTIME_ERROR),
        ("def add(a, b):\n    while True: pass", Verdict.TIMEOUT),
    ],
)
def test_verdicts_by_hand(anywhere: Pool, program: str, expected: Verdict) -> None:
    assert verdict(anywhere, program) == expected


def test_rewards_are_those_of_the_paper() -> None:
    assert [REWARDS[verdict] for verdict in Verdict] == [-1.0, -0.6, -0.6, -0.3, 1.0]


def test_order_duplicates_and_cache(anywhere: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    judge = pools._Worker.judge
    monkeypatch.setattr(pools._Worker, "judge", lambda *args: judged.append(args[2]) or judge(*args))
    first, second = RIGHT + "# cache 1", WRONG + "# cache 2"
    passed, failed = Verdict.PASSED, Verdict.FAILED
    assert anywhere.run([(ADD, second), (ADD, first), (ADD, second)]) == [failed, passed, failed]
    other = ADD._replace(name="other", tests="assert add(2, 2) == 0")
    assert anywhere.run([(ADD, first), (other, first), (other, second)]) == [passed, failed, passed]
    assert judged == [second, first, first, second]
    assert anywhere.run([]) == []
    monkeypatch.setattr(pools, "_REMEMBERED", 1)
    for times in (2, 3):  # known until all but the newest are forgotten
        assert anywhere.run([(ADD, first)]) == [passed] and judged.count(first) == times


def test_two_workers_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    used, parsing = [], set()
    judge, parse = pools._Worker.judge, ast.parse
    monkeypatch.setattr(pools._Worker, "judge", lambda *args: used.append(args[0]) or judge(*args))
    monkeypatch.setattr(
        ast, "parse", lambda *args, **kw: parsing.add(threading.get_ident()) or parse(*args, **kw)
    )
    with Pool(2, limits=LIMITS, isolation="none") as pool:
        sleepers = [(ADD, f"import time\ntime.sleep(0.2)\n{RIGHT}# {i}") for i in range(2)]
        assert pool.run(sleepers) == [Verdict.PASSED] * 2
        assert set(used) == set(pool._workers)
    assert parsing == {threading.get_ident()}  # CPython 3.11's parser is not safe in several threads


def test_a_program_that_waits_too_long() -> None:
    with Pool(1, limits=LIMITS._replace(deadline=0.5), isolation="none") as pool:
        assert verdict(pool, "import time\ntime.sleep(99)") == Verdict.TIMEOUT
        assert (
            verdict(pool, RIGHT, ADD._replace(tests=f"import time\ntime.sleep(99)\n{ADD.tests}"))
            == Verdict.TIMEOUT
        )


def test_a_deadline_is_for_programs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those that compute slowly, as on a busy machine: a fifth of the processor time each time will do."""
    looks: list[Callable[[], None]] = []
    exits: list[int] = []
    judge = [0.0]
    monkeypatch.setattr(signal, "signal", lambda _, look: looks.append(look))
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(time, "process_time", lambda: judge[0])
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\n__import__('sys').stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1) as process:
        assert process.stdin and process.stdout
        worker._end_if_idle(LIMITS, process.pid)
        process.stdout.readline()
        looks[0]()
        judge[0] += 0.25
        looks[0]()
        assert exits == []
        looks[0]()
        assert exits == [worker._FIRST_VERDICT + Verdict.TIMEOUT]
        process.stdin.close()
    judge[0] += 1.0  # more than the program had, which has none any more
    looks[0]()
    assert len(exits) == 1


@pytest.mark.parametrize(
    ("returned", "test"),
    [
        *(
            (value, f"x = f()\nassert x == {value} and type(x) is type({value})")
            for value in (
                r"(1, [2.5, 'é\n\udc80'], {'k': None, 3: {4, 5}}, frozenset('ab'), b'\x00\xff', 1 + 2j)",
                "[float('inf'), 10**5000, True, range(1, 9, 2), {}, '', ()]",
            )
        ),
        ("(i * i for i in range(3))", "x = f()\nassert next(x) == 0 and list(x) == [1, 4]"),
        ("{2: 0, 1: 0}.keys()", "assert sorted(f()) == [1, 2]"),
        ("float('nan')", "x = f()\nassert x != x and type(x) is float"),
        ("__import__('fractions').Fraction(1, 2)", "assert f() == 0.5 and f().denominator == 2"),
        ("__import__('decimal').Decimal('0.10')", "assert str(f()) == '0.10'"),
        ("__import__('collections').deque([1, 2])", "assert list(f()) == [1, 2] and f() and len(f()) == 2"),
        ("__import__('collections').deque()", "assert not f()"),
        (
            "type('Bag', (), {'__len__': lambda self: 2, '__iter__': lambda self: iter((5, 6))})()",
            "assert f() and len(f()) == 2 and list(f()) == [5, 6]",
        ),
        ("type('None_', (), {'__bool__': lambda self: False})()", "assert not f()"),
    ],
)
def test_answers_arrive_as_they_were(anywhere: Pool, returned: str, test: str) -> None:
    program = f"def f():\n    return {returned}"
    assert verdict(anywhere, program, Problem("f", "", test, ("f",), "")) == Verdict.PASSED


def test_functions_that_can_be_imported_are_handed_over(anywhere: Pool) -> None:
    """MBPP's task 533 hands over a type; the program may call its own things by such names."""
    program = "getattr = list = int = None\n"
    program += "def f(kind, *more): return [x for x in more if not isinstance(x, kind)]"
    tests = "import math\nassert f(int, 1, 'a') == ['a']\nassert g(math.sqrt, 4) == 2 and g(str.upper, 'a') == 'A'"
    program += "\ndef g(function, x): return function(x)"
    assert verdict(anywhere, program, Problem("f", "", tests, ("f", "g"), "")) == Verdict.PASSED


LINKS = """
class Link:
    def __init__(self, value, after=None): self.value, self.after = value, after
    def __eq__(self, other): return self.value == getattr(other, "value", other)
    def __lt__(self, other): return self.value < other.value
    def __getitem__(self, i): return [self.value, self.after][i]
    def __setitem__(self, i, value): self.value = value
    def __contains__(self, value): return self.value == value
    def __repr__(self): return f"<{self.value}>"
    def __add__(self, other): return Link(self.value + getattr(other, "value", other))
    __radd__ = __add__
    def __hash__(self): return hash(self.value)
    def __enter__(self): return self
    def __exit__(self, *_): self.value = "left"
    @property
    def twice(self): return 2 * self.value
def f(x): return x.after
"""
ERRORS = """
class Mine(ValueError):
    def __init__(self, code, why):
        super().__init__(why)
        self.code = code
class Deeper(Mine):
    def __str__(self): return "deeper: " + self.args[0]
def f(x):
    if x == 0: raise Deeper(7, "why")
    if x == 1: return {}["k"]
    if x == 2: open("/no/such/file")
    raise __import__("json").JSONDecodeError("bad", "doc", 1)
"""
# What right programs do, and tests of it, which those pass in one process as well.
FORWARDED = {
    "changes in place": (
        """
        def f(x, n=0):
            x[0].append(3)
            x.append(x.pop(0))
            x[0]['k'] = x[-1]
            return x
        """,
        """
        a, b = [1], {}
        x = [a, b]
        assert f(x, n=2) is x and a == [1, 3] and x == [b, a] and b['k'] is a is x[1]
        """,
    ),
    "one object in several places": (
        """
        def f(rows, row, *, named):
            rows[0][0] += 1
            rows[1][0] += 1
            row.append(rows[0] is rows[1] is row)
            named['a']['k'] = 1
            return rows[1][0], named['b'][0]['k']
        """,
        """
        row, d = [0, 0], {}
        rows = [row] * 2
        assert f(rows, row, named={'a': d, 'b': (d,)}) == (2, 1) and d == {'k': 1}
        assert rows == [[2, 0, True]] * 2 and rows[0] is row is rows[1]
        """,
    ),
    "equal objects in several places": (
        """
        def f(rows):
            rows[0][0] = 1
            return rows[1][0]
        """,
        """
        rows = [[0], [0]]
        assert f(rows) == 0 and rows == [[1], [0]]
        """,
    ),
    "changes of other kinds": (
        """
        def f(a, b, c, *, d, e):
            a.add(2)
            b.rotate()
            c[0] = 65
            d.update('aab')
            e[3] = 4
            e.move_to_end(1)
        """,
        """
        import collections as k
        a, b, c, d = {1}, k.deque([1, 2]), bytearray(b'x'), k.Counter('a')
        e = k.OrderedDict({1: 2})
        f(a, b, c, d=d, e=e)
        assert (a, b, c, d) == ({1, 2}, k.deque([2, 1]), b'A', k.Counter('aaab')) and d.most_common(1) == [('a', 3)]
        assert e == k.OrderedDict([(3, 4), (1, 2)]) and list(e) == [3, 1]
        """,
    ),
    "dates": (
        """
        from datetime import *
        def f(day, zone):
            return day + timedelta(1), datetime(2020, 1, 2, 3, 4, 5, 6, zone), time(1)
        """,
        """
        from datetime import *
        zone = timezone(timedelta(hours=2))
        assert f(date(2020, 2, 28), zone) == (date(2020, 2, 29), datetime(2020, 1, 2, 3, 4, 5, 6, zone), time(1))
        assert f(date.min, zone)[1].isoformat()[-6:] == '+02:00'
        """,
    ),
    "types": (
        """
        def f(x): return type(x)
        """,
        """
        assert f(1) is int and f('') == str and f([]) is list
        """,
    ),
    "named tuples": (
        """
        from collections import *
        P = namedtuple('P', 'x y')
        def f(p): return P(p.x + 1, p.y)
        """,
        """
        from collections import *
        Q = namedtuple('Q', 'x y')
        p = f(Q(1, 2))
        assert p.x == 2 and p == (2, 2) and p._fields == ('x', 'y')
        """,
    ),
    "collections": (
        """
        from collections import *
        def f(): return Counter('aab'), OrderedDict(b=1, a=2), {1: 2}.keys(), bytearray(b'a')
        """,
        """
        from collections import *
        c, o, k, b = f()
        assert c['z'] == 0 and c.most_common(1) == [('a', 2)]
        assert o != OrderedDict(a=2, b=1) and o == OrderedDict(b=1, a=2) and len(k) == 1 and k == {1}
        b.append(1)
        """,
    ),
    "endless generators": (
        """
        import itertools
        def f():
            yield from itertools.count(3)
        def g(x): return next(x)
        """,
        """
        import itertools
        x = f()
        assert list(itertools.islice(x, 3)) == [3, 4, 5] and g(x) == 6 and next(x) == 7
        assert all(a == b for a, b in zip(f(), [3, 4])) and iter(x) is x
        """,
    ),
    "generators that end": (
        """
        def f(n):
            for i in range(n): yield i
            return 5
        """,
        """
        x = f(2)
        assert list(x) == [0, 1] and next(x, None) is None and sum(f(4)) == 6
        """,
    ),
    "classes": (
        LINKS,
        """
        a, b = Link(1), Link(2, Link(3))
        assert a < b and sorted([b, a]) == [a, b] and max(a, b) is b
        assert repr(a) == '<1>' and str([a]) == '[<1>]' and a[0] == 1 and b[1].value == 3 and f(b) is b.after
        a[0] = 5
        assert a == Link(5) and a == 5 and 5 in a and 6 not in a and a != b and a + b == 7 and 1 + a == 6
        assert a.__eq__(5) and not a.__eq__(b) and a.__add__(2) == 7 and Link.__eq__(a, 5) and not hasattr(a, '__sub__')
        assert {Link(4), Link(4)} == {Link(4)} and b.twice == 4 and not hasattr(b, 'thrice') and not callable(b)
        assert isinstance(a, Link) and type(a).__name__ == 'Link' and not isinstance(a, list)
        with a as entered: assert entered is a
        assert a.value == 'left' and f(b).after is None
        """,
    ),
    "exceptions": (
        ERRORS,
        """
        def caught(x):
            try: f(x)
            except Exception as error: return error
        try: f(0)
        except Mine as error: assert str(error) == 'deeper: why' and error.code == 7 and error.args == ('why',)
        else: assert False
        assert isinstance(caught(0), ValueError) and str(caught(1)) == "'k'" and caught(2).errno == 2
        assert isinstance(caught(1), KeyError) and isinstance(caught(2), FileNotFoundError)
        import json
        try: f(3)
        except json.JSONDecodeError as error: assert error.pos == 1
        """,
    ),
    "printing": (
        """
        import sys
        def f(x):
            print(x, 'é')
            sys.stdout.write('end')
        """,
        """
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as out: f(1)
        assert out.getvalue() == '1 é\\nend'
        with contextlib.redirect_stdout(io.StringIO()) as out: f('')
        assert out.getvalue() == ' é\\nend'
        """,
    ),
    "asyncio": (
        """
        import asyncio
        async def f(x):
            await asyncio.sleep(0.001)
            return x + 1
        def g(x): return asyncio.run(f(x))
        """,
        """
        import asyncio
        assert g(1) == 2 and asyncio.run(f(2)) == 3
        async def both(): return await asyncio.gather(f(1), f(2)), await f(5)
        assert asyncio.run(both()) == ([2, 3], 6)
        """,
    ),
    "threads": (
        """
        import threading, queue, concurrent.futures as c, asyncio
        def f(n):
            out = queue.Queue()
            many = [threading.Thread(target=out.put, args=(i,)) for i in range(n)]
            for one in many: one.start()
            for one in many: one.join()
            assert not any(one.is_alive() for one in many)
            return sorted(out.get() for _ in many)
        def g(n):
            with c.ThreadPoolExecutor(3) as pool: return list(pool.map(abs, range(-n, 0)))
        def h(): return asyncio.run(asyncio.to_thread(lambda: threading.current_thread() is threading.main_thread()))
        """,
        """
        assert f(3) == [0, 1, 2] and g(5) == [5, 4, 3, 2, 1] and h() is False
        """,
    ),
    "numpy": (
        """
        import numpy as np
        def f(x): return np.cumsum(x), np.int32(3), np.float32(0.1), np.bool_(True), np.eye(2)
        """,
        """
        import numpy as np
        a, i, x, b, e = f(np.array([1, 2, 3]))
        assert a.tolist() == [1, 3, 6] and i == 3 and x == 0.1 and bool(b)
        assert np.array_equal(e, np.eye(2)) and e.shape == (2, 2) and e.dtype == float and np.allclose(f([0.5])[0], 0.5)
        """,
    ),
    "changes of numpy's arrays": (
        """
        import numpy as np
        def f(x, y, z):
            x[0, 1] = 5
            y.sort()
            return x
        """,
        """
        import numpy as np
        x, y, z = np.eye(2), np.array([2.5, 1.5]), np.arange(3)
        assert f(x, y, z) is x
        assert x.tolist() == [[1, 5], [0, 1]] and y.tolist() == [1.5, 2.5] and z.tolist() == [0, 1, 2]
        """,
    ),
    "plain values under classes": (
        """
        from enum import Enum
        class Name(str):
            def __str__(self): return 'another'
        class Colour(str, Enum): RED = 'red'
        class Share(float):
            def __float__(self): return 2.0
            def __str__(self): return 'half'
        def f(): return Name('one'), Colour.RED, Share(0.5)
        """,
        """
        assert f() == ('one', 'red', 0.5)
        """,
    ),
    "missing keys": (
        """
        from collections import defaultdict
        def f(x):
            x['a'].append(1)
            return defaultdict(int, {'b': 2}), defaultdict(lambda: 3, c=4)
        """,
        """
        from collections import defaultdict
        x = defaultdict(list)
        some, other = f(x)
        assert x == {'a': [1]} and x['more'] == [] and some == {'b': 2} and some['none'] == 0 and other == {'c': 4}
        """,
    ),
    "slices": (
        """
        from collections import UserList
        class Odd:
            def __getitem__(self, key): return key
        def f(): return UserList([1, 2, 3]), memoryview(b'abc'), Odd()
        """,
        """
        some, view, odd = f()
        assert list(some[1:]) == [2, 3] and bytes(view[::-1]) == b'cba'
        assert odd[1:'x'] == slice(1, 'x', None) and odd[..., 0] == (..., 0) and odd[NotImplemented] is NotImplemented
        some[:2] = [5]
        assert list(some) == [5, 3]
        """,
    ),
}


@pytest.mark.parametrize("what", FORWARDED)
def test_right_programs_pass(anywhere: Pool, what: str) -> None:
    """What tests see of a program in the same process they see of one in a sandbox: Python itself is asked, too."""
    program, tests = map(textwrap.dedent, FORWARDED[what])
    if "numpy" in what:
        pytest.importorskip("numpy")
    entry = [name for name in ("f", "g", "h", "Link", "Mine") if re.search(rf"\b{name}\b", tests)]
    problem = Problem(what, "", f"{tests}\nassert True", tuple(entry), program)
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    exec(problem.tests, namespace)
    assert verdict(anywhere, f"{program}\n# once more", problem) == Verdict.PASSED


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(): return object()", "assert callable(f())"),
        (
            "def f(): return object()",
            "from collections.abc import Iterable\nassert isinstance(f(), Iterable)",
        ),
        ("def f(): return object()", "assert hasattr(f(), '__len__')"),
        ("def f(): return object()", "assert hasattr(f(), '__getitem__') or f() < f()"),
        ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
        ("def f(x): raise StopIteration", "for x, y in zip(map(f, [1]), [2]):\n    assert x == y"),
        ("def f(x=0): raise StopIteration", "assert all(x == 1 for x in iter(f, 2))"),
        ("def f(x): raise StopAsyncIteration", "assert all(map(f, [1, 2]))"),
        *(
            (f"class E:\n    def __{name}__(self, *_): return {value}\ndef f(): return E()", f"assert {test}")
            for name, value, test in (
                ("sub", 0, "abs(f() - 4) < 1"),
                ("rsub", 0, "4 - f() == 0"),
                ("gt", True, "f() > 3"),
                ("lt", True, "3 > f()"),
                ("contains", True, "3 in f()"),
                ("eq", True, "f() == 3"),
                ("eq", True, "3 in [f()]"),
                ("eq", True, "f().__eq__(3)"),
                ("pow", True, "f().__pow__(2)"),
                ("getattr", "lambda *_: True", "f().__contains__(3)"),
                ("getattr", "lambda *_: True", "f().__add__(3)"),
            )
        ),
        ("class E(int):\n    __eq__ = lambda *_: True\ndef f(): return {E(1): E(2)}", "assert f() == {3: 4}"),
        (
            "from collections import *\ndef f(): return OrderedDict(a=1, b=2)",
            "from collections import *\nassert f() == OrderedDict(b=2, a=1)",
        ),
    ],
)
def test_wrong_programs_do_not_pass(anywhere: Pool, program: str, tests: str) -> None:
    """Objects have the operations that they have, and no others; nor do they decide how they compare with data."""
    assert verdict(anywhere, program, Problem("f", "", tests, ("f",), "")) in (
        Verdict.FAILED,
        Verdict.RUNTIME_ERROR,
    )


@pytest.mark.parametrize(
    "use", ["len({})", "sorted({})", "set({})", "bool({})", "{}.name", "str({})", "not {}", "g({})"]
)
@pytest.mark.parametrize("handle", ["null", "true", "1.5", '"__import__"', "[]"])
def test_a_handle_that_is_none_is_its_programs_failure(anywhere: Pool, use: str, handle: str) -> None:
    """And nobody else's: the tests are not blamed, and the rest of the batch is judged."""
    line = f'[true, {{"reference": [{handle}, "x", ["__len__", "__iter__", "__bool__"], null]}}, [], ""]'
    attack = f"""
    import sys
    def g(x): return 1
    def f():
        sys.modules['rl.programs.wire'].dumps = lambda *_, **__: b'{line}\\n'
        return 1
    """
    problem = Problem("f", "", f"x = f()\ny = {use.format('x')}\nassert y or True", ("f", "g"), "")
    right = "def f(): return 'a'\ndef g(x): return 1"
    verdicts = anywhere.run([(problem, textwrap.dedent(attack)), (problem, f"{right} # {handle}")])
    assert verdicts[0] == Verdict.RUNTIME_ERROR and verdicts[1] == (
        Verdict.FAILED if "name" in use else Verdict.PASSED
    )


def test_a_program_that_alone_brings_its_tests_to_hand_over_what_they_cannot(anywhere: Pool) -> None:
    tests = "class Own: pass\nassert f(1 if f(0) else Own())"
    problem = Problem("f", "", tests, ("f",), "def f(x): return True")
    programs = [(problem, "def f(x): return False"), (problem, "def f(x): return 1")]
    assert anywhere.run(programs) == [Verdict.RUNTIME_ERROR, Verdict.PASSED]


@pytest.mark.parametrize("use", ["f().sort(key=lambda x: x)", "f().count(Own())", "assert f()(Own())"])
def test_an_object_in_place_of_data_is_its_programs_failure(anywhere: Pool, use: str) -> None:
    """Without a reference to tell: tests may give to a list what they cannot give to an object of the program."""
    program = """
    class Any:
        def sort(self, **_): pass
        def count(self, other): return 0
        def __call__(self, other): return 1
    def f(): return Any()
    """
    problem = Problem("f", "", f"class Own: pass\n{use}\nassert True", ("f",), "")
    verdicts = anywhere.run([(problem, textwrap.dedent(program)), (problem, "def f(): return [2, 1]")])
    assert verdicts == [Verdict.RUNTIME_ERROR, Verdict.FAILED if "assert" in use else Verdict.PASSED]


def test_problems_whose_reference_fails_are_refused_by_name(anywhere: Pool) -> None:
    problems = [ADD._replace(name=f"P/{i}", reference=text) for i, text in enumerate((RIGHT, WRONG, "1 / 0"))]
    with pytest.raises(ValueError, match=r"these problems .*: 'P/1' \(FAILED\), 'P/2' \(RUNTIME_ERROR\)\."):
        anywhere.run([(problem, f"{RIGHT}# refused") for problem in problems])
    assert verdict(anywhere, f"{RIGHT}# refused", problems[0]) == Verdict.PASSED


def test_problems_that_judge_nobody_are_told_apart_once_and_for_all(
    anywhere: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is forgotten: a sound problem must not become unsound when its reference is slower another time."""
    own = "class Own: pass\nassert add(Own(), 1)"
    problems = [
        ADD._replace(name=name, reference=f"{text}# {name}", tests=tests)
        for name, text, tests in (("a", RIGHT, ADD.tests), ("b", WRONG, ADD.tests), ("c", RIGHT, own))
    ]
    failing = anywhere.failing([*problems, ADD, *problems])
    assert failing == {problems[1]: "FAILED", problems[2]: "UNTESTABLE"}
    with pytest.raises(ValueError, match=r"'b' \(FAILED\), 'c' \(UNTESTABLE\)"):
        anywhere.run([(problem, RIGHT) for problem in problems])
    monkeypatch.setattr(pools, "_REMEMBERED", 1)
    anywhere.run([(ADD, f"{RIGHT}# one more {i}") for i in range(3)])
    assert (ADD, f"{RIGHT}# one more 0") not in anywhere._verdicts
    monkeypatch.setattr(pools._Worker, "judge", lambda *_: Verdict.TIMEOUT)
    assert anywhere.failing(problems[:1]) == {}


@pytest.mark.parametrize("expression", ["lambda x: x", "Own()"])
def test_what_tests_cannot_hand_over_is_refused(anywhere: Pool, expression: str) -> None:
    problem = Problem("P/7", "", f"class Own: pass\nassert f({expression})", ("f",), "")
    with pytest.raises(ValueError, match="'P/7' hand the program a function or an object of their own"):
        verdict(anywhere, "def f(x): return True", problem)
    assert verdict(anywhere, RIGHT + f"# after {expression}") == Verdict.PASSED


def test_tests_that_expect_an_exception(anywhere: Pool) -> None:
    tests = "try:\n    f(0)\n    seen = False\nexcept {}:\n    seen = True\nassert seen"
    for expected in ("ValueError", "Exception"):
        problem = Problem(expected, "", tests.format(expected), ("f",), "")
        assert verdict(anywhere, "def f(x): raise ValueError", problem) == Verdict.PASSED
        assert verdict(anywhere, "def f(x): return 1", problem) == Verdict.FAILED
        # To be gone is not to raise.
        assert verdict(anywhere, "import os\ndef f(x): os._exit(3)", problem) == Verdict.RUNTIME_ERROR
    problem = Problem("other", "", tests.format("ValueError"), ("f",), "")
    assert verdict(anywhere, "def f(x): raise KeyError", problem) == Verdict.RUNTIME_ERROR


def test_subclasses_arrive_as_what_they_derive_from(anywhere: Pool) -> None:
    program = """
    import collections, enum
    class Colour(enum.IntEnum):
        RED = 3
    def f():
        return collections.namedtuple("P", "x y")(Colour.RED, collections.Counter("aab"))
    """
    problem = Problem("f", "", "assert f() == (3, {'a': 2, 'b': 1})", ("f",), "")
    assert verdict(anywhere, program, problem) == Verdict.PASSED


def test_objects_of_the_program_stay_with_it(anywhere: Pool) -> None:
    tests = """
root = Node(1)
root.left = Node(2)
root.left.right = Node(value=3)
assert total(root) == 6 and root.left.value == 2
assert root != Node(1) and [root] == [root]
"""
    program = """
    class Node:
        left = right = None
        def __init__(self, value):
            self.value = value
    def total(node):
        return node.value + total(node.left) + total(node.right) if node else 0
    """
    assert verdict(anywhere, program, Problem("tree", "", tests, ("Node", "total"), "")) == Verdict.PASSED


def test_nothing_depends_on_chance(anywhere: Pool) -> None:
    observes(anywhere, "import random\ndef probe(): return random.random()", random.Random(0).random())
    seeded = [sys.executable, "-c", "print(hash('a'))"]
    expected = int(subprocess.run(seeded, env={"PYTHONHASHSEED": "0"}, capture_output=True).stdout)
    observes(anywhere, "def probe(): return hash('a')", expected)
    tests = "import random\nassert random.random() == probe()"  # of which the tests alone decide
    problem = Problem("draw", "", tests, ("probe",), "")
    program = f"def probe(): return {random.Random(tests).random()!r}"
    assert verdict(anywhere, program, problem) == Verdict.PASSED


# ---- programs that want to be taken for right -------------------------------------------------------------------

CHEATS = {
    "prints a verdict": "print('PASSED', 4, flush=True)\n" + WRONG,
    "writes a verdict everywhere": """
        import os
        for descriptor in range(64):
            for verdict in (b'R', bytes([4, 0]), b'[true, 3]\\n{"tuple": [true, 3]}\\n'):
                try: os.write(descriptor, verdict)
                except OSError: pass
        def add(a, b): return None
        """,
    "exits with the status of a pass": "import sys\nsys.exit(68)",
    "exits within a test": "import sys\ndef add(a, b): sys.exit(68)",
    "exits at once within a test": "import os\ndef add(a, b): os._exit(68)",
    "exits with 0 within a test": "import os\ndef add(a, b): os._exit(0)",
    "exits later": "import atexit, os\natexit.register(os._exit, 68)\n" + WRONG,
    "ends by a signal": "import signal\ndef add(a, b): signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()",
    "crashes": "import ctypes\ndef add(a, b): ctypes.string_at(0)",
    "patches builtins": """
        import builtins
        class Lenient(type(None).__class__.__base__ and Exception): pass
        builtins.AssertionError = Lenient
        builtins.abs = lambda x: 0
        builtins.isinstance = lambda *_: True
        def abs(x): return 0
        def add(a, b): return 5
        """,
    "is equal to all": """
        class Equal:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __bool__(self): return True
        def add(a, b): return Equal()
        """,
    "is an int that is equal to all": """
        class Equal(int):
            __eq__ = lambda self, other: True
            __hash__ = int.__hash__
        def add(a, b): return Equal(7)
        """,
    "changes what it is asked with": """
        import json, sys
        sys.modules['rl.programs.wire'].dumps = lambda *_: b'{"reference": "__import__(\\'os\\')._exit(68)"}\\n'
        json.dumps = lambda *_: '{"tuple": [true, {"__eq__": true}]}'
        class Anything:
            def __getattr__(self, name): return Anything()
            def __call__(self, *_): return Anything()
        def add(a, b): return Anything()
        """,
    "traces": "import sys\nsys.settrace(lambda *_: None)\nsys.setprofile(lambda *_: None)\n" + WRONG,
    "rewrites the code that runs it": """
        import sys
        frame = sys._getframe()
        while frame:
            for name, value in list(frame.f_globals.items()):
                if name in ('_test', '_judge', 'Verdict', 'Remote', '_run_job', '_Program'):
                    frame.f_globals[name] = lambda *_, **__: 4
            frame = frame.f_back
        def add(a, b): return 5
        """,
    "raises what a test raises": "def add(a, b): raise AssertionError",
    "raises what nobody catches": "def add(a, b): raise BaseException",
    "leaves a module for the next": "open('math.py', 'w').write('1/0')\nopen('json.py', 'w').write('1/0')\n"
    + WRONG,
    "draws what the tests draw": "from random import *\ndef add(a, b): return random() + random()",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_do_not_pass(anywhere: Pool, cheat: str) -> None:
    tests = "x = add(2, 2)\nassert abs(x - 4) < 1e-6\nassert isinstance(x, int) and x == 4"
    drawn = "from random import *\na, b = random(), random()\nassert add(a, b) == a + b"  # as in HumanEval/38
    for problem in (ADD, ADD._replace(tests=tests), ADD._replace(tests=drawn)):
        assert verdict(anywhere, CHEATS[cheat], problem) in (Verdict.FAILED, Verdict.RUNTIME_ERROR)
    assert verdict(anywhere, f"{RIGHT}# after: {cheat}") == Verdict.PASSED


def test_no_address_becomes_data_of_the_tests(anywhere: Pool) -> None:
    """NumPy believes what an object says of where its data are: a program read the judge's memory by that."""
    pytest.importorskip("numpy")
    place = f"id(__import__('json').__doc__) + {sys.getsizeof('') - 1}"  # the same in judge and program
    pointer = f"""
        import json
        class Pointer: pass
        pointer = Pointer()
        pointer.__array_interface__ = {{"data": ({place}, True), "shape": (16,), "typestr": "|u1", "version": 3}}
        """
    as_array = """
        import rl.programs.wire as wire
        real, asked = wire.dumps, []
        def probe():
            asked.append(1)
            return 0
        def forged(value, refer, **others):
            if not asked: return real(value, refer, **others)
            asked.clear()
            array = {"array": ["|u1", [16], {"reference": refer(pointer)}]}
            return json.dumps({"tuple": [True, array, [], ""]}).encode() + b"\\n"
        wire.dumps = forged
        """
    tests = "import json, numpy\nassert bytes(numpy.asarray(probe()).tolist()) == json.__doc__.encode()[:16]"
    problem = ADD._replace(tests=tests, entry=("probe",))
    for program in (pointer + as_array, pointer + "\n        def probe(): return pointer"):
        assert verdict(anywhere, textwrap.dedent(program), problem) in (Verdict.FAILED, Verdict.RUNTIME_ERROR)


def test_a_program_sees_no_tests(anywhere: Pool) -> None:
    program = """
    import gc, sys
    def probe():
        frame, seen = sys._getframe(), []
        while frame:
            seen += [*frame.f_locals.values(), *frame.f_globals.values()]
            frame = frame.f_back
        text = repr(seen) + repr(gc.get_objects())
        return "-".join(["canary", "in", "tests"]) in text
    """
    problem = Problem("probe", "", "'canary-in-tests'\nassert probe() is False", ("probe",), "")
    verdicts = anywhere.run([(problem, textwrap.dedent(program) + f"# {i}") for i in range(2)])
    assert verdicts == [Verdict.PASSED] * 2


# ---- programs that take more than their share ---------------------------------------------------------------------

# None is so greedy that a machine on which the limits do not work would be harmed.
ENDLESS = {
    "ignores signals": """
        import signal
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        while True: pass
        """,
    "loops in C": "sum(range(10**15))",
    "floods its output": "while True: print('x' * 10**6)",
}
GREEDY = {
    "forks": "import os\nfor _ in range(5): os.fork()",
    "forks in endless threads": "import os, threading\nfor _ in range(99): threading.Thread(target=os.fork).start()",
    "starts a shell": "import os\nassert os.system('true') == 0",
    "starts processes": "import subprocess\nfor _ in range(5): subprocess.Popen(['sleep', '9'])",
    "takes memory at once": "x = bytearray(10**9)",
    "takes memory in steps": "x = [bytearray(10**6) for _ in range(1000)]",
    "takes shared memory": "from multiprocessing import shared_memory as m\nm.SharedMemory(create=True, size=10**9)",
    "takes memory outside of itself": "import os\nos.memfd_create('x')",
    "fills the folder": "for i in range(9): open(str(i), 'wb').write(bytes(10**6))",
    "writes a large file": "import os\nos.truncate(os.open('x', os.O_RDWR | os.O_CREAT), 10**9)",
    "answers too much": "def add(a, b): return 'x' * 10**7",
    "answers for ever": "def add(a, b):\n    x = []\n    while True: x.append(x)",
    "answers in circles": "x = []\nx.append(x)\ndef add(a, b): return x",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: [f()]\nf()",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
}


SLOW = ("answers for ever", "recurses")


@pytest.mark.parametrize("greed", [*ENDLESS, *GREEDY])
def test_greed_ends_and_leaves_nothing(isolated: Pool, greed: str) -> None:
    text = textwrap.dedent((ENDLESS | GREEDY)[greed])
    outcome = verdict(isolated, text if "def add" in text else f"{text}\n{RIGHT}")
    # What takes memory in small steps may run out of time first.
    late = greed in ENDLESS or (greed in SLOW and outcome == Verdict.TIMEOUT)
    assert outcome == (Verdict.TIMEOUT if late else Verdict.RUNTIME_ERROR)
    assert verdict(isolated, f"{RIGHT}# after: {greed}") == Verdict.PASSED
    # One or two that wait (bubblewrap), the one that forks, and two for the next job.
    assert len(descendants(isolated._workers[0]._process.pid)) <= 5


def test_an_answer_too_long_to_compare(isolated: Pool) -> None:
    problem = ADD._replace(tests="x = add(1, 2)\nassert x ** 40 == 3")
    assert verdict(isolated, "def add(a, b): return 9 ** 600_000", problem) == Verdict.TIMEOUT


def descendants(process: int) -> list[int]:
    processes = [process]
    for parent in processes:
        processes += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return processes


# ---- programs that want to get out --------------------------------------------------------------------------------


def failing(action: str) -> str:
    """A probe: the name of the error that this raises."""
    action = textwrap.indent(textwrap.dedent(action), " " * 8)
    caught = "    except OSError as error:\n        return type(error).__name__\n"
    return f"import os, ctypes, socket\ndef probe():\n    try:\n{action}\n{caught}"


def test_the_callers_files_are_not_there(isolated: Pool, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the caller's")
    for path in (secret, Path(__file__), Path.cwd(), "/etc/passwd", "/proc/self", "/var", "/usr/bin"):
        observes(isolated, f"import os\ndef probe(): return os.path.exists({str(path)!r})", False)
    observes(isolated, failing(f"os.remove({str(secret)!r})"), "FileNotFoundError")
    observes(isolated, "import os\ndef probe(): return os.listdir(), os.getcwd()", ([], "/tmp"))
    shown = {path.split("/")[1] for path in (*kernel.folders(), os.path.realpath(sys.executable))}
    shown |= {
        "dev",
        "tmp",
        "packages",
        "etc",
        "code",
    }  # the last two with bubblewrap: the linker's cache, and what runs there
    observes(isolated, f"import os\ndef probe(): return set(os.listdir('/')) - {shown}", set())
    assert secret.read_text() == "the caller's"


def test_what_is_there_cannot_be_changed(isolated: Pool) -> None:
    library = Path(os.__file__)
    for path in ("/new", "/dev/new", library.parent / "new.py", library):
        observes(isolated, failing(f"open({str(path)!r}, 'w')"), "OSError")
    observes(isolated, failing(f"os.remove({str(library)!r})"), "OSError")
    observes(isolated, failing("import shutil; shutil.rmtree('/lib')"), "OSError")
    assert library.exists()


def test_files_do_not_outlive_a_program(isolated: Pool) -> None:
    observes(isolated, "import os\nopen('x', 'w').write('hi')\ndef probe(): return os.listdir()", ["x"])
    observes(isolated, "import os\ndef probe(): return os.listdir()", [])
    observes(isolated, "import os\nopen('y', 'w'); os.chmod('.', 0)\ndef probe(): return 1", 1)
    observes(isolated, "import os\ndef probe(): return os.listdir('/tmp')", [])


@pytest.mark.parametrize(
    "trace", ["os.chmod('.', 0o555)", "os.utime('.', (1, 1))", "os.setxattr('.', 'user.x', b'1')"]
)
def test_folders_do_not_either(isolated: Pool, trace: str) -> None:
    observes(isolated, f"import os\ntry: {trace}\nexcept OSError: pass\ndef probe(): return 1", 1)
    probe = "import os\ndef probe(): return open('x', 'w').write('hi'), os.listxattr('.'), os.stat('.').st_mtime > 1"
    observes(isolated, f"{probe}\n# after {trace}", (2, [], True))


def test_no_network(anywhere: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        observes(anywhere, failing(f"socket.create_connection({address!r}, 1)"), "PermissionError")
        observes(anywhere, failing("socket.socket(socket.AF_UNIX)"), "PermissionError")
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_no_other_process_can_be_reached(anywhere: Pool) -> None:
    # Signal 0 does nothing, so that nothing happens where it is not refused.
    for action in (
        f"os.kill({os.getpid()}, 0)",
        "os.kill(1, 0)",
        "os.kill(-1, 0)",
        "os.kill(os.getppid(), 0)",
        "os.killpg(0, 0)",
        "os.execv('/bin/true', ['true'])",
        "os.setpriority(os.PRIO_USER, 0, 19)",
        "os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))",
        "os.sched_setaffinity(0, {0})",
    ):
        observes(anywhere, failing(action), "PermissionError")
    raw = """
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(16, os.getppid(), 0, 0) == -1 and ctypes.get_errno() == 1
    assert libc.unshare(0x10000000) == -1 and ctypes.get_errno() == 1
    assert libc.mount(b'x', b'/', b'tmpfs', 0, 0) == -1 and ctypes.get_errno() == 1
    return 'refused'
    """
    observes(anywhere, failing(raw), "refused")


@pytest.mark.parametrize("victim", ["os.getpid() + 1", "os.getppid()"])
@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
def test_no_signal_reaches_the_judge_or_the_worker(isolated: Pool, victim: str, number: str) -> None:
    """As the news that a pipe can be read, which no other test sends; a judge that is stopped costs 20 seconds."""
    program = f"""
    import fcntl, os, signal
    def add(a, b):
        reader, writer = os.pipe()
        try:
            fcntl.fcntl(reader, fcntl.F_SETOWN, {victim})
            fcntl.fcntl(reader, 10, signal.{number})
        except PermissionError:
            return a + b
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(writer, b"x")
        return a + b
    """
    worker = isolated._workers[0]._process
    assert verdict(isolated, program) == Verdict.PASSED
    assert isolated._workers[0]._process is worker


def test_every_system_call_that_is_not_allowed_is_refused(anywhere: Pool) -> None:
    """Also those that Linux does not have yet: what no other test names (AIO, fanotify, personality, sync, ...)."""
    machine = os.uname().machine
    column = kernel._ARCHITECTURES[machine][0]
    known = [*kernel._ALLOWED.values(), *kernel._PRETENDED.values()]
    known += [numbers for _, numbers, _ in kernel._ALLOWED_WITH]
    others = set(range(1000)) - {numbers[column] for numbers in known}
    others -= {
        335,
        336,
    }  # uretprobe and uprobe, which Linux lets past every filter and which end who calls them
    others |= {0x40000000 + number for number in range(600)} if machine == "x86_64" else set()
    program = f"""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def refusal(number):
        ctypes.set_errno(0)
        return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6), ctypes.get_errno()
    def probe(): return {{number for number in {sorted(others)} if refusal(number) not in ((-1, 1), (-1, 38))}}
    """
    observes(anywhere, textwrap.dedent(program), set())


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86-64's")
def test_attacks_by_their_numbers_are_refused(anywhere: Pool) -> None:
    """Not taken from the list of what is allowed, so that none of them gets there."""
    attacks = {
        "io_setup": 206,
        "sync": 162,
        "syncfs": 306,
        "open_tree": 428,
        "open_tree_attr": 467,
        "fanotify_init": 300,
        "inotify_init": 253,
        "inotify_init1": 294,
        "personality": 135,
        "flock": 73,
        "ptrace": 101,
        "bpf": 321,
        "userfaultfd": 323,
        "io_uring_setup": 425,
        "perf_event_open": 298,
    }
    program = f"""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def refused(number):
        ctypes.set_errno(0)
        return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6) == -1 and ctypes.get_errno() in (1, 38)
    def probe(): return [name for name, number in {attacks}.items() if not refused(number)]
    """
    observes(anywhere, textwrap.dedent(program), [])


@pytest.mark.parametrize(
    "action",
    [
        *(
            f"fcntl.fcntl(open({place}), {command}, {argument})"
            for place in ("os.__file__", "os.devnull")
            # a read lease, F_NOTIFY, F_SETOWN, F_SETSIG, a larger pipe, the upper half of the argument
            for command, argument in ((1024, 0), (1026, 1), (8, 1), (10, 9), (1031, 1 << 20), (-8, 1))
        ),
        "fcntl.fcntl(open(os.__file__), 15, bytes(8))",  # F_SETOWN_EX
        "fcntl.flock(open(os.devnull), fcntl.LOCK_SH)",
        "fcntl.lockf(open(os.__file__), fcntl.LOCK_SH)",
        "fcntl.ioctl(os.pipe()[0], 0x8901, bytes(4))",  # FIOSETOWN
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.socketpair()[0].sendto(b'x', '/x')",
    ],
)
def test_calls_are_refused_for_their_arguments(anywhere: Pool, action: str) -> None:
    observes(anywhere, failing(f"import fcntl\n{action}"), "PermissionError")


def test_programs_of_one_worker_share_no_descriptor_and_no_time(isolated: Pool) -> None:
    program = """
    import fcntl, os, stat
    def is_open(i):  # and is no pipe, which every job has anew
        try:
            return not stat.S_ISFIFO(os.fstat(i).st_mode)
        except OSError:
            return False
    def probe():
        held = [i for i in range(64) if is_open(i)]
        before = [fcntl.fcntl(i, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_APPEND) for i in held]
        for i in held:
            fcntl.fcntl(i, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND)
        times = os.stat(".").st_atime_ns - os.stat(".").st_mtime_ns
        os.listdir(".")
        return before, times
    """
    for attempt in range(2):
        observes(isolated, textwrap.dedent(program) + f"# attempt {attempt}", ([0, 0, 0], 0))


def test_in_namespaces_of_its_own(isolated: Pool) -> None:
    assert (
        verdict(isolated, RIGHT + "# a worker that runs: after some programs it is replaced")
        == Verdict.PASSED
    )
    inside = descendants(isolated._workers[0]._process.pid)[1]
    for kind in ("net", "pid", "mnt", "ipc", "uts", "user"):
        assert os.readlink(f"/proc/{inside}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    observes(isolated, "import os\ndef probe(): return os.getppid() <= 2", True)


def test_nothing_of_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    with Pool(1, limits=LIMITS, isolation="none") as pool:
        observes(pool, "import os\ndef probe(): return 'TOKEN' in os.environ", False)


# ---- workers that end -----------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced(anywhere: Pool) -> None:
    assert verdict(anywhere, RIGHT + "# before the kill") == Verdict.PASSED
    process = anywhere._workers[0]._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert verdict(anywhere, RIGHT + "# after the kill") == Verdict.PASSED
    killer = threading.Timer(0.3, lambda: anywhere._workers[0]._process.kill())
    killer.start()
    assert verdict(anywhere, "import time\ntime.sleep(0.6)\n" + RIGHT) == Verdict.PASSED
    killer.join()


def test_a_program_whose_worker_always_dies(anywhere: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = pools._Worker._ask

    def killed(worker: pools._Worker, line: bytes) -> bytes:
        # All of them: what lies below the first dies after it, and may answer until then.
        for pid in reversed(descendants(worker._process.pid)):
            os.kill(pid, signal.SIGKILL)
        return ask(worker, line)

    with monkeypatch.context() as patch:
        patch.setattr(pools._Worker, "_ask", killed)
        assert verdict(anywhere, RIGHT + "# always dies") == Verdict.RUNTIME_ERROR
    assert verdict(anywhere, RIGHT + "# dies no more") == Verdict.PASSED


@pytest.mark.slow
def test_a_stuck_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(Limits, "longest", 1.0)
    with Pool(1, limits=LIMITS, isolation="none") as pool:
        os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
        assert verdict(pool, "import time\ntime.sleep(9)") == Verdict.TIMEOUT
        assert verdict(pool, RIGHT) == Verdict.PASSED


@pytest.mark.slow
def test_closing_leaves_no_process(isolated: Pool) -> None:
    with Pool(2, isolation=isolated.isolation) as pool:
        processes = [pid for worker in pool._workers for pid in descendants(worker._process.pid)]
        assert len(processes) >= 6
    deadline = time.monotonic() + 10
    while (
        alive := [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    ) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_without_isolation_nothing_runs_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    boot = 'import sys\nif "none" not in sys.argv: raise PermissionError(1, "unshare: not permitted")\n'
    monkeypatch.setattr(pools, "_BOOT", boot + pools._BOOT)
    with pytest.raises(
        IsolationError, match=r"no program bwrap.*namespaces.*unshare: not permitted.*isolation='none'"
    ):
        Pool(1)
    with Pool(1, isolation="none") as pool:
        assert verdict(pool, RIGHT) == Verdict.PASSED


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Pool(0, isolation="none")
    with pytest.raises(ValueError, match="namespaces or none, got 'docker'"):
        Pool(1, isolation="docker")


UNREACHED = """
def check(candidate):
    assert candidate(1, 2) == 3
    check(candidate)
class Test:
    def run(self):
        assert add(1, 2) == 3
"""


@pytest.mark.parametrize(
    ("tests", "why"),
    [("x = add(1, 2)", "no tests"), (UNREACHED, "no tests"), ("assert (", "will not compile")],
)
def test_a_problem_without_tests(anywhere: Pool, tests: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"problem 'add' {why}|problem 'add' has {why}"):
        anywhere.run([(ADD._replace(tests=tests), RIGHT)])


@pytest.mark.parametrize(
    "calls",
    [
        "check(add)",
        "def twice():\n    check(add)\ntwice()",
        "Test().run()",
        "globals()['check'](add)",
        "def check(candidate): pass\ncheck(add)",  # one of that name asserts; which one, only running tells
    ],
)
def test_tests_in_functions_that_something_names(calls: str) -> None:
    check(ADD._replace(tests=UNREACHED + calls))


# ---- the wire -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[",
        b'{"code": 1}\n',
        b'{"dict": 3}\n',
        b'{"set": [[]]}\n',
        b'{"tuple": [], "set": []}\n',
        b'[{"first": [0]}, {"again": 0}]\n',  # which only the tests may say: twenty such make a million
        b"\xff",
    ],
)
def test_a_line_that_was_not_agreed_is_an_error(line: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017
        wire.loads(line, lambda handle: handle)


# ---- programs that read and print -----------------------------------------------------------------------------------

SUMS = Problem(
    "sums", "", "", (), "", (("2\n1 2\n3 4\n", "3\n7\n"), ("1\n5 -5\n", "0\n"), ("0", "")), "lines"
)
SUM_LINES = "for _ in range(int(input())):\n    print(sum(map(int, input().split())))\n"
# As fast programs do it: whole files at once, by their descriptors.
FAST = """
import os, sys
from io import BytesIO, IOBase
class Fast(IOBase):
    def __init__(self, file):
        self.descriptor, self.buffer = file.fileno(), BytesIO()
        self.write = self.buffer.write if "w" in file.mode else None
        if self.write is None:
            self.buffer = BytesIO(os.read(self.descriptor, os.fstat(self.descriptor).st_size))
    def flush(self):
        if self.write:
            os.write(self.descriptor, self.buffer.getvalue())
            self.buffer.truncate(0), self.buffer.seek(0)
sys.stdin, sys.stdout = Fast(sys.stdin), Fast(sys.stdout)
input = sys.stdin.buffer.readline
for _ in range(int(input())):
    sys.stdout.write(b"%d\\n" % sum(map(int, input().split())))
"""


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (SUM_LINES, Verdict.PASSED),
        (FAST, Verdict.PASSED),
        ("def main():\n    print('\\n'.join(str(sum(map(int, x.split()))) for x in list(open(0))[1:]))\n"
         "if __name__ == '__main__': main()", Verdict.PASSED),
        (SUM_LINES + "exit()\nprint(1)", Verdict.PASSED),
        (SUM_LINES + "__import__('sys').exit(0)", Verdict.PASSED),
        (SUM_LINES + "__import__('sys').exit(1)", Verdict.RUNTIME_ERROR),
        (SUM_LINES + "quit('bad input')", Verdict.RUNTIME_ERROR),
        (SUM_LINES + "import os, sys\nsys.stdout.flush()\nos._exit(0)", Verdict.PASSED),
        (SUM_LINES + "import os, sys\nsys.stdout.flush()\nos._exit(1)", Verdict.RUNTIME_ERROR),
        (SUM_LINES + "import os\nos._exit(0)", Verdict.FAILED),  # nothing was flushed
        ("import os, sys, threading\ndef main():\n" + textwrap.indent(SUM_LINES, "    ")
         + "    sys.stdout.flush()\n    os._exit(0)\nthreading.Thread(target=main).start()", Verdict.PASSED),
        ("import os, sys\ntry:\n" + textwrap.indent(SUM_LINES, "    ") + "    sys.stdout.flush(); os._exit(0)\n"
         "except BaseException: raise SystemExit(1)\nfinally: print(1)", Verdict.PASSED),
        ("import sys\nfor write in (sys.__stdout__.write, sys.stdout.write)[:int(input())]:\n"
         "    write(f'{sum(map(int, sys.__stdin__.readline().split()))}\\n')", Verdict.PASSED),
        ("import sys\nfor x in list(sys.stdin)[1:]: sys.__stdout__.write(f'{sum(map(int, x.split()))}\\n')",
         Verdict.PASSED),
        ("import atexit, sys\nlines = list(sys.stdin)[1:]\n@atexit.register\ndef last():\n"
         "    for line in lines: print(sum(map(int, line.split())))", Verdict.PASSED),
        ("import sys, threading\ndef main():\n    __import__('time').sleep(0.05)\n"
         "    for line in list(sys.stdin)[1:]: print(sum(map(int, line.split())))\n"
         "threading.Thread(target=main).start()", Verdict.PASSED),
        # What an interpreter ends before it joins threads, and closes when it forgets the module's names.
        ("import sys\nfrom concurrent.futures import ThreadPoolExecutor as Pool\npool = Pool(2)\n"
         "for x in list(sys.stdin)[1:]: print(pool.submit(lambda: sum(map(int, x.split()))).result())",
         Verdict.PASSED),
        ("import sys\nout = open(1, 'w')\nfor x in list(sys.stdin)[1:]: print(sum(map(int, x.split())), file=out)",
         Verdict.PASSED),
        # Calls through `lru_cache` have frames on the stack, of which a thread has 8 MiB; such programs ask for more.
        ("import sys, threading\nfrom functools import lru_cache\nsys.setrecursionlimit(10**6)\n"
         "threading.stack_size(2**27)\n@lru_cache(None)\ndef f(n): return n and 1 + f(n - 1)\ndef main():\n"
         "    if sys.version_info[:2] not in ((3, 12), (3, 13)): assert f(25_000) == 25_000\n"  # limit C's recursion
         "    for line in list(sys.stdin)[1:]: print(sum(map(int, line.split())))\n"
         "t = threading.Thread(target=main)\nt.start()\nt.join()", Verdict.PASSED),
        ("import builtins\nbuiltins.seen = getattr(builtins, 'seen', 0) + 1\nassert seen == 1\n" + SUM_LINES,
         Verdict.PASSED),  # nothing is left of the run before
        ("print('\\x01' * 10**6)", Verdict.FAILED),  # as JSON six times as long
        ("print(3, 7)", Verdict.FAILED),
        (SUM_LINES + "print('more')", Verdict.FAILED),
        ("pass", Verdict.FAILED),
        ("print(3); print(7)", Verdict.FAILED),
        ("print 3", Verdict.COMPILE_ERROR),
        ("input(); input(); input(); input()", Verdict.RUNTIME_ERROR),
        (SUM_LINES + "while True: pass", Verdict.TIMEOUT),
        ("while True: print('x' * 10**5)", Verdict.RUNTIME_ERROR),
    ],
)  # fmt: skip
def test_scripts_by_hand(anywhere: Pool, program: str, expected: Verdict) -> None:
    assert verdict(anywhere, program, SUMS) == expected


@pytest.mark.parametrize(
    ("match", "printed", "expected", "same"),
    [
        ("lines", " a  b \n\nc", "a b\nc\n", True),
        ("lines", "a\nb", "a b", False),
        ("lines", "YES", "yes", False),
        ("lines", "0.300000001", "0.3", True),
        ("lines", "0.3001", "0.3", False),
        ("lines", "100000.5", "100000.0", True),
        ("lines", "10000000000000001", "10000000000000000", False),
        ("lines", "1", "1.0", True),
        ("lines", "b a", "a b", False),
        ("lines", "1_0", "10", False),
        ("lines", "a\n\nb\nc", "a\nb", False),
        ("lines", "a", "a\nb", False),
        ("lines", "nan", "0", False),
        ("lines", "5", "inf", False),
        ("lines", "inf", "5", False),
        ("words", "a\nb", "a b", True),
        ("words", "YES", "yes", True),
        ("words", "100000.5", "100000.0", False),
        ("words", "0.300001", "0.3", True),
        ("words", "1 2 3", "1 2", False),
        ("words", "", " \n", True),
    ],
)
def test_outputs_are_compared_as_their_dataset_does(
    match: str, printed: str, expected: str, same: bool
) -> None:
    assert MATCHES[match](printed, expected) == same


@pytest.mark.parametrize("character", ["x", "\x01", "\u20ac"])
def test_scripts_print_as_much_as_the_limit_says(anywhere: Pool, character: str) -> None:
    """Not an eighth of it, for fear of what JSON makes of a character."""
    count = LIMITS.output // len(character.encode()) - 1
    problem = SUMS._replace(cases=(("", character * count),))
    assert verdict(anywhere, f"print({character!r} * {count})", problem) == Verdict.PASSED
    assert verdict(anywhere, f"print({character!r} * {count + 2})", problem) == Verdict.RUNTIME_ERROR


def test_a_script_does_not_see_what_is_expected(anywhere: Pool) -> None:
    """It looks for the expected output in the letters of that, of which the comparison makes nothing."""
    probe = """
    import gc, sys
    text = sys.stdin.read()
    seen = [each for each in gc.get_objects() if 'gNiHtOn' in str(each)[::-1]]
    print('something' if seen else 'nothing')
    """
    for stdin, expected in (("asked", Verdict.PASSED), ("nOtHiNg", Verdict.FAILED)):
        problem = SUMS._replace(cases=((stdin, "nOtHiNg"),), match="words")
        assert verdict(anywhere, probe, problem) == expected


# ---- readers --------------------------------------------------------------------------------------------------------

HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\ndef area(r):\n    return math.pi * r * r\n\ndef ring(a, b):\n    '''Between.'''\n",
    "entry_point": "ring",
    "canonical_solution": "    return area(a) - area(b)\n",
    "test": "def check(candidate):\n    assert abs(candidate(2, 1) - 3 * area(1)) < 1e-9\n",
}
MBPP = {
    "task_id": 601,
    "text": "Write a function to add the sizes of pairs.",
    "code": "import sys\r\nclass Pair:\r\n  def __init__(self, a): self.a = a\r\ndef sum(p, q):\r\n  return p.a + q.a",
    "test_setup_code": "p = Pair(1)",
    "test_list": ["assert sum(p, Pair(2)) == 3", "assert sum(p, p) < sys.maxsize"],
}


def test_read_humaneval_by_hand(tmp_path: Path, anywhere: Pool) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(HUMANEVAL).encode()))
    [problem] = read_humaneval(path)
    assert (problem.name, problem.entry) == ("HumanEval/0", ("ring",))
    assert problem.prompt == HUMANEVAL["prompt"]
    assert verdict(anywhere, problem.reference, problem) == Verdict.PASSED
    # The tests have an `area` of their own: the program cannot bend theirs.
    bent = "def area(r): return 0\ndef ring(a, b): return 0"
    assert verdict(anywhere, bent, problem) == Verdict.FAILED


@pytest.mark.parametrize("standard", [True, False])
def test_read_mbpp_by_hand(tmp_path: Path, anywhere: Pool, standard: bool) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(MBPP) if standard else json.dumps([{**MBPP, "test_imports": ["import sys"]}]))
    [problem] = read_mbpp(path, "train")
    assert (problem.name, problem.entry) == ("MBPP/601", ("Pair", "sum"))
    assert problem.prompt.splitlines()[1:3] == [MBPP["text"], MBPP["test_list"][0]]
    assert verdict(anywhere, problem.reference, problem) == Verdict.PASSED
    assert read_mbpp(path, "test") == []


@pytest.mark.parametrize(
    ("text", "test"),
    [(r"the path C:\Users\new", "assert f('ab') == 2"), ("the length", 'assert f("""ab""") == 2')],
)
def test_a_prompt_that_is_no_python_as_published_is_one_here(
    tmp_path: Path, anywhere: Pool, text: str, test: str
) -> None:
    path = tmp_path / "x.jsonl"
    row = {"task_id": 1, "text": text, "code": "def f(s):\n    return len(s)", "test_list": [test]}
    path.write_text(json.dumps(row))
    [problem] = read_mbpp(path)
    assert verdict(anywhere, problem.prompt + problem.reference, problem) == Verdict.PASSED


@pytest.mark.parametrize(
    "limits",
    [
        Limits(seconds=2.0),  # type: ignore[arg-type]
        Limits(seconds=0),
        Limits(memory=5e8),  # type: ignore[arg-type]
        Limits(output=0),
        Limits(seconds=80),
        Limits(deadline=float("nan")),
    ],
)
def test_limits_that_every_program_exceeds_are_refused(limits: Limits) -> None:
    with pytest.raises(ValueError, match=r"(seconds|memory|output|deadline)=.* must be"):
        Pool(1, limits=limits)


def test_read_samples_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"task_id": "a", "prompt": "p", "samples": ["x", "y"]}) + "\n")
    assert read_samples(path) == [("a", "p", ("x", "y"))]


APPS = {
    "problem_id": 7,
    "question": 'Add the numbers of each line: \\sum \\u00 """x""".',
    "solutions": json.dumps([SUM_LINES]),
    "input_output": json.dumps({"inputs": ["1\n1 2\n", ["1", "3 4"]], "outputs": ["3\n", ["7"]]}),
    "starter_code": "",
}
CALLED = {
    "id": 8,
    "question": "Add.",
    "solutions": json.dumps(["class Solution:\n    def pair(self, a, b): return (a, [b])"]),
    "input_output": json.dumps(
        {"fn_name": "pair", "inputs": [[1, 2], [3, 4]], "outputs": [[1, [2]], [[3, [4]]]]}
    ),
    "starter_code": "class Solution:\n    def pair(self, a, b):\n        ",
}
CONTEST = {
    "name": "1_A. Sums",
    "description": "Add the numbers of each line.",
    "public_tests": {"input": ["1\n1 2\n"], "output": ["3"]},
    "private_tests": {"input": [], "output": []},
    "generated_tests": [{"input": "1\n3 4\n", "output": "7"}],
    "solutions": {"language": [2, 3], "solution": ["int main() {}", SUM_LINES]},
}


def test_read_apps_by_hand(tmp_path: Path, anywhere: Pool) -> None:
    path = tmp_path / "x.jsonl"
    rows = [APPS, CALLED, {**APPS, "problem_id": 9, "input_output": ""}]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.warns(UserWarning, match=r"x.jsonl: 1 of 3 problems have no tests"):
        read, called = read_apps(path)
    assert (read.name, read.cases) == ("APPS/7", (("1\n1 2\n", "3\n"), ("1\n3 4", "7")))
    assert verdict(anywhere, read.prompt + read.reference, read) == Verdict.PASSED
    assert verdict(anywhere, read.prompt + "print(3)", read) == Verdict.FAILED
    assert "\\sum \\u00 '''x'''" in read.prompt
    assert (called.name, called.entry) == (
        "APPS/8",
        ("Solution",),
    ) and "def pair(self, a, b):" in called.prompt
    assert verdict(anywhere, called.prompt + called.reference, called) == Verdict.PASSED
    assert verdict(anywhere, called.reference.replace("[b]", "b"), called) == Verdict.FAILED
    equal = "class Equal:\n    def __eq__(self, other): return True\n"
    for returned in ("Equal()", "(a, Equal())"):
        program = f"{equal}class Solution:\n    def pair(self, a, b): return {returned}"
        assert verdict(anywhere, program, called) == Verdict.FAILED


@pytest.mark.parametrize(
    ("expected", "equal", "other"),
    [
        ([5], ("5", "[5]", "(5,)"), ("[[5]]", "[]", "'5'")),
        ([[1, 2]], ("[1, 2]", "(1, 2)", "[(1, 2)]"), ("1", "[1]")),
        ([1, 2], ("[1, 2]", "(1, 2)"), ("1", "[1]", "[[1, 2]]")),
        ([{"1": 2}, {"3": 4}], ("({1: 2}, {'3': 4})",), ("{1: 2}",)),
        ([], ("[]", "()"), ("None",)),
    ],
)
def test_what_is_equal_for_apps(expected: Any, equal: Any, other: Any, tmp_path: Path) -> None:
    """A list of one stands for its item; the first of several items is not all that is expected."""
    path = tmp_path / "x.jsonl"
    tests = {"fn_name": "pair", "inputs": [[1, 2]], "outputs": [expected]}
    path.write_text(json.dumps({**CALLED, "input_output": json.dumps(tests)}))
    [problem] = read_apps(path)

    def passes(answer: str) -> bool:
        names: dict[str, Any] = {}
        exec(f"class Solution:\n    def pair(self, a, b): return {answer}", names)
        try:
            exec(problem.tests, names)
        except AssertionError:
            return False
        return True

    assert all(map(passes, equal)) and not any(map(passes, other))


def test_what_the_harness_of_apps_does_before_a_program(tmp_path: Path, anywhere: Pool) -> None:
    """Names that starter code takes for granted, and keys of dictionaries that JSON made texts of."""
    tests = {"fn_name": "count", "inputs": [[{"1": 2, "3": 4}, "5"]], "outputs": [{"4": 3, "2": 1}]}
    solution = (
        "class Solution:\n    def count(self, x: List[dict], y): return Counter({b: a for a, b in x.items()})"
    )
    called = {**CALLED, "solutions": json.dumps([solution]), "input_output": json.dumps(tests)}
    script = "print(ceil(math.sqrt(2)) + np.prod([1, 3]) if input() else gcd)"
    reads = {**APPS, "solutions": json.dumps([script])}
    reads["input_output"] = json.dumps({"inputs": ["1"], "outputs": ["5"]})
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, (called, reads))))
    first, second = read_apps(path)
    assert "count(*[{1: 2, 3: 4}, '5']), {4: 3, 2: 1})" in first.tests
    assert anywhere.failing([first]) == {}
    assert verdict(anywhere, solution.replace("b: a for a, b", "str(b): a for a, b"), first) == Verdict.FAILED
    has_numpy = importlib.util.find_spec("numpy") is not None
    assert anywhere.failing([second]) == ({} if has_numpy else {second: "RUNTIME_ERROR"})
    assert verdict(anywhere, script, second._replace(reference="", imports=())) == Verdict.RUNTIME_ERROR
    missing = second._replace(imports=("import no_such_module as np",), reference="")
    assert verdict(anywhere, "np = 5\nprint(np)", missing) == Verdict.PASSED


def test_read_code_contests_by_hand(tmp_path: Path, anywhere: Pool) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [CONTEST, {**CONTEST, "input_file": "in.txt"}])))
    with pytest.warns(UserWarning, match=r"x.jsonl: 1 of 2 problems have no tests"):
        [read] = read_code_contests(path)
    assert (read.name, read.cases, read.match) == (
        "1_A. Sums",
        (("1\n1 2\n", "3"), ("1\n3 4\n", "7")),
        "words",
    )
    assert read.reference == SUM_LINES and verdict(anywhere, read.prompt + SUM_LINES, read) == Verdict.PASSED
    broken = read._replace(reference="print(3)")
    with pytest.raises(ValueError, match=r"references of these problems do not pass.*'1_A. Sums' \(FAILED\)"):
        anywhere.run([(broken, SUM_LINES)])


def test_files_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"task_id": 1}\n')
    for read in (read_humaneval, read_mbpp, read_samples):
        with pytest.raises(ValueError, match=r"x\.jsonl, line 1 has no "):
            read(path)
    path.write_text('{"task_id": 1')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 1: it is not JSON"):
        read_samples(path)
    path.write_text("")
    with pytest.raises(ValueError, match=r"x\.jsonl is empty"):  # no problems would mean no evaluation
        read_humaneval(path)
    path.write_text(json.dumps({**HUMANEVAL, "test": "def check(candidate): pass"}))
    with pytest.raises(ValueError, match="'HumanEval/0' has no tests"):
        read_humaneval(path)
    with pytest.raises(ValueError, match="no split 'dev', but prompt, test, validation, train"):
        read_mbpp(path, "dev")


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (
            read_humaneval,
            {**HUMANEVAL, "prompt": "def ring(:\n"},
            "'HumanEval/0'.* prompt .* will not compile",
        ),
        (read_humaneval, {**HUMANEVAL, "test": "def check("}, "'HumanEval/0'.* tests .* will not compile"),
        (read_humaneval, {**HUMANEVAL, "prompt": None}, "'HumanEval/0': "),
        (read_mbpp, {**MBPP, "code": "def sum(p, q:"}, "601.* code of .*'MBPP/601' will not compile"),
        (read_mbpp, {**MBPP, "test_list": ["assert sum(p"]}, "601.* tests of .*'MBPP/601' will not compile"),
        (read_mbpp, {**MBPP, "test_list": []}, "'MBPP/601' has no tests"),
        (read_mbpp, {**MBPP, "test_list": None}, "601: "),
        (
            lambda path: read_mbpp(path, "train"),
            {**MBPP, "task_id": "601"},
            "its task_id is no whole number",
        ),
        (read_mbpp, 7, "line 1 has no task_id, code, test_list"),
        (read_apps, {**APPS, "input_output": "{"}, "7: its input_output is no JSON"),
        (read_apps, {**APPS, "input_output": {"inputs": ["1"]}}, "7: 'outputs' is missing"),
        (read_apps, {**APPS, "input_output": {"inputs": ["1"], "outputs": []}}, "7: zip"),
        (
            read_apps,
            {**APPS, "input_output": {"inputs": [1], "outputs": [1]}},
            "7: its input or output is no text",
        ),
        (read_apps, {**APPS, "question": None}, "7: its question is no text, but null"),
        (read_apps, {"question": ""}, "line 1 has no input_output"),
        (read_apps, {**APPS, "question": "a \0"}, "7: no Python program can begin with its text"),
        (read_apps, {"question": "", "input_output": ""}, "it has no name: none of task_id"),
        (
            read_code_contests,
            {**CONTEST, "public_tests": {"input": ["1"]}},
            "1_A. Sums': 'output' is missing",
        ),
        (read_code_contests, {**CONTEST, "solutions": 5}, "1_A. Sums': "),
        (read_code_contests, {**CONTEST, "description": 5}, "its question is no text, but 5"),
    ],
)
def test_a_problem_that_cannot_be_used(tmp_path: Path, read: Any, row: Any, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match=rf"x\.jsonl.*{message}"):
        read(path)


# ---- the real files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[Pool]:
    for isolation in ("bubblewrap", "namespaces"):
        if available(isolation):
            with Pool(limits=Limits(seconds=20, deadline=60.0), isolation=isolation) as pool:
                yield pool
            return
    pytest.skip("nothing isolates programs here")


@pytest.mark.slow
def test_humaneval_references_pass_and_nothing_does_not(data_file: Callable[[str], Path], real: Pool) -> None:
    problems = read_humaneval(data_file("programs/HumanEval.jsonl.gz"))
    assert len(problems) == 164
    verdicts = real.run([(problem, problem.reference) for problem in problems])
    assert set(verdicts) == {Verdict.PASSED}
    assert Verdict.PASSED not in real.run([(problem, problem.prompt + "    pass\n") for problem in problems])


@pytest.mark.slow
def test_mbpp_references_pass(data_file: Callable[[str], Path], real: Pool) -> None:
    path = data_file("programs/mbpp.jsonl")
    problems = read_mbpp(path)
    assert len(problems) == 974
    assert [len(read_mbpp(path, split)) for split in MBPP_SPLITS] == [10, 500, 90, 374]
    some = problems[::8] + [
        problem for problem in problems if problem.name in ("MBPP/126", "MBPP/367", "MBPP/533", "MBPP/927")
    ]
    assert set(real.run([(problem, problem.reference) for problem in some])) == {Verdict.PASSED}
    sanitized = read_mbpp(data_file("programs/sanitized-mbpp.json"))
    assert len(sanitized) == 427
    assert set(real.run([(problem, problem.reference) for problem in sanitized[::16]])) == {Verdict.PASSED}


@pytest.mark.long
def test_codegen_programs(data_file: Callable[[str], Path], real: Pool) -> None:
    problems = {problem.name: problem for problem in read_humaneval(data_file("programs/HumanEval.jsonl.gz"))}
    samples = read_samples(data_file("programs/humaneval_codegen16b_samples.jsonl.gz"))
    assert len(samples) == 126 and {len(one.completions) for one in samples} == {100}
    pairs = [(problems[one.name], one.prompt + text) for one in samples for text in one.completions[::50]]
    verdicts = real.run(pairs)
    # As HumanEval's own harness does it: program and tests in one process, which says itself how it went.
    harness_pairs = [
        (
            Problem(problem.name, "", "assert passed()", ("passed",), ""),
            f"{text}\n{problem.tests}\ndef passed(): return True\n",
        )
        for problem, text in pairs
    ]
    passed = [verdict == Verdict.PASSED for verdict in verdicts]
    assert passed == [verdict == Verdict.PASSED for verdict in real.run(harness_pairs)]
    assert sum(passed) / len(pairs) == pytest.approx(0.207, abs=0.05)  # of all 12,600
    assert set(verdicts) >= set(Verdict) - {Verdict.TIMEOUT}
