"""A pool of sandboxes that judge programs against the tests of problems.

What a program can reach: its own process (a few threads, limited memory and processor time), an empty folder of limited
size, the standard library, numpy where the caller has it, and the judge's questions. What keeps it there, strongest
first:

- ``bubblewrap``: the program of that name (Debian and others package it) makes the namespaces and the read-only root.
- ``namespaces``: the same from here, without a program to install (`rl.programs.kernel.enter_namespaces`).
- ``none``: neither; only the limits and the filter of system calls remain, with which a program still reads and writes
  whatever its user may, its judge's memory included if that user is root. It is never chosen unless asked for.

A worker is a small Python that forks for every program, so that hundreds run in a second. What that gives up against
an interpreter and a sandbox for each: programs of one worker share a kernel namespace one after another, the same
address-space layout and the same hash seed. A program that leaves its folder otherwise than it was costs its worker, so
none finds anything.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import queue
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rl import log
from rl.machine import usable_cores
from rl.programs import kernel, verdicts
from rl.programs.problems import Problem, asks_for_a_class, check
from rl.programs.verdicts import UNTESTABLE, Limits, Verdict
from rl.programs.worker import READY, RETIRES

REWARDS: Mapping[Verdict, float] = MappingProxyType(
    {
        Verdict.COMPILE_ERROR: -1.0,
        Verdict.RUNTIME_ERROR: -0.6,
        Verdict.TIMEOUT: -0.6,
        Verdict.FAILED: -0.3,
        Verdict.PASSED: 1.0,
    }
)
"""What a program earns (CodeRL; B-Coder, section 3); not to end in time counts as an error at run time."""

_ISOLATIONS = ("bubblewrap", "namespaces")  # in the order of preference
_LIMITS = Limits()
_REMEMBERED = 100_000  # verdicts, some hundred bytes each: training judges new programs for days
_START_SECONDS = 30.0
_GRACE_SECONDS = 5.0  # in which a worker must have told how the judge ended
# Threads that share one arena do not each reserve address space, of which a program has little.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
_BOOT = """
import sys
folder, *arguments = sys.argv[1:]
sys.path.insert(0, folder)
from rl.programs import worker
del sys.path[0]
worker.main(*arguments)
"""


class IsolationError(RuntimeError):
    """Nothing here can isolate a program."""


class UntestableError(ValueError):
    """The tests of a problem hand over what cannot reach a program."""


class Pool:
    """Workers that judge programs, and the verdicts they gave; a context manager.

    A verdict is found once for each problem and text, while it is among the newest 100,000. Programs run with a fixed
    hash seed and a fixed seed of ``random``, and tests with a seed made of their text, so that it does not depend on
    chance. Programs are timed by the processor that they use (`Limits`): the machine's load decides only where one is
    close to its limit, because on a busy machine it uses somewhat more.

    Args:
        workers: sandboxes that work at the same time; by default one for each available core.
        limits: what one program and its tests may use.
        isolation: one of those above; by default the strongest that works here.

    Raises:
        IsolationError: none works here, or not the one asked for.
        ValueError: fewer than one worker, an unknown isolation, or limits that are none.
    """

    def __init__(
        self, workers: int | None = None, *, limits: Limits = _LIMITS, isolation: str | None = None
    ) -> None:
        if sys.platform != "linux":
            raise IsolationError(f"programs are judged on Linux only, not on {sys.platform}")
        if isolation not in (None, "none", *_ISOLATIONS):
            raise ValueError(f"isolation must be one of {', '.join(_ISOLATIONS)} or none, got {isolation!r}")
        count = usable_cores() if workers is None else workers
        if count < 1:
            raise ValueError(f"workers must be at least 1, got {count}")
        verdicts.check(limits)
        first = _strongest(isolation, limits)
        self.isolation = first.isolation
        self._workers = [first, *(_Worker(self.isolation, limits) for _ in range(count - 1))]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count)
        self._verdicts: dict[tuple[Problem, str], Verdict] = {}

    def run(self, programs: Iterable[tuple[Problem, str]]) -> list[Verdict]:
        """The verdict on each program, in the order given.

        A problem whose own reference does not pass its tests here (`failing`) is refused.

        Args:
            programs: pairs of a problem and a program's text.

        Raises:
            ValueError: the tests of a problem do not compile or assert nothing, or hand the program functions or
                objects of their own, or fail the problem's reference; nothing was judged if so.
            IsolationError: a worker died, and no other could be started.
        """
        programs = list(programs)
        failing = self.failing(problem for problem, _ in programs)
        if failing:
            raise ValueError(
                f"the references of these problems do not pass their tests here: {named(failing)}. Leave the problems "
                "out, raise the limits (of experiments.language: --program_seconds), or correct the references"
            )
        if untestable := self._find(programs):
            raise next(iter(untestable.values()))
        verdicts = [self._verdicts[pair] for pair in programs]
        self._forget(len(self._verdicts) - _REMEMBERED)
        return verdicts

    def failing(self, problems: Iterable[Problem]) -> dict[Problem, str]:
        """The problems that say nothing about programs, because their own reference does not pass their tests here.

        Each reference is judged once. A problem without one is taken as it is.

        Returns:
            What came of their references: the name of a `Verdict`, or ``UNTESTABLE`` where the tests hand over
            functions or objects of their own, which cannot reach a program.

        Raises:
            ValueError: the tests of a problem do not compile or assert nothing.
            IsolationError: a worker died, and no other could be started.
        """
        problems = list(dict.fromkeys(problems))
        for problem in problems:
            check(problem)
        references = [(problem, problem.reference) for problem in problems if problem.reference]
        untestable = self._find(references)
        outcomes = {
            pair: "UNTESTABLE" if pair in untestable else self._verdicts[pair].name for pair in references
        }
        return {
            problem: outcome for (problem, _), outcome in outcomes.items() if outcome != Verdict.PASSED.name
        }

    def _find(self, programs: list[tuple[Problem, str]]) -> dict[tuple[Problem, str], UntestableError]:
        """Judges what has no verdict yet; returns those programs whose tests cannot be run."""
        new = list(dict.fromkeys(pair for pair in programs if pair not in self._verdicts))
        # Here, not in the threads: before Python 3.13 `ast.parse` fails now and then where several threads call it.
        decides = {problem: asks_for_a_class(problem) for problem in {problem for problem, _ in new}}
        results = self._threads.map(self._judge, new, [decides[problem] for problem, _ in new])
        untestable = {}
        shown = log.progress(len(new), "programs", over=results, delay=3, leave=False)
        for pair, result in zip(new, shown, strict=True):
            if isinstance(result, UntestableError):
                untestable[pair] = result
            else:
                self._verdicts[pair] = result
        return untestable

    def _forget(self, count: int) -> None:
        """The oldest verdicts, but none on a reference: a problem that was found to be sound stays so."""
        others = (pair for pair in self._verdicts if pair[1] != pair[0].reference)
        for pair in list(itertools.islice(others, max(count, 0))):
            del self._verdicts[pair]

    def close(self) -> None:
        """End the workers. Those of a pool that is not closed end with this process."""
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, pair: tuple[Problem, str], decides: bool) -> Verdict | UntestableError:
        problem, _ = pair
        worker = self._idle.get()
        try:
            return worker.judge(*pair, decides)
        except UntestableError as error:
            # If the reference passed, only this program brought the tests to that.
            if self._verdicts.get((problem, problem.reference)) == Verdict.PASSED:
                return Verdict.RUNTIME_ERROR
            return error
        finally:
            self._idle.put(worker)


def named(failing: Mapping[Problem, str]) -> str:
    """What `Pool.failing` returned, in words."""
    return ", ".join(sorted(f"{problem.name!r} ({outcome})" for problem, outcome in failing.items()))


def _strongest(isolation: str | None, limits: Limits) -> _Worker:
    """A worker with the isolation asked for, or else with the first that works."""
    refused = []
    for name in [isolation] if isolation else _ISOLATIONS:
        try:
            return _Worker(name, limits)
        except IsolationError as error:
            refused.append(f"{name}: {error}")
    raise IsolationError(
        f"programs are not run, because nothing isolates them here ({'; '.join(refused)}). Install bubblewrap, or "
        "allow user namespaces; or pass isolation='none' to let every program do whatever you may do yourself"
    )


class _Worker:
    """A sandbox with `rl.programs.worker` in it, and another when that one has ended."""

    def __init__(self, isolation: str, limits: Limits) -> None:
        self.isolation, self._limits = isolation, limits
        self._start()

    def judge(self, problem: Problem, text: str, decides: bool) -> Verdict:
        """Of a problem with inputs and outputs the verdict on the first that does not pass.

        ``decides`` is `asks_for_a_class` of the problem.
        """
        words = set(re.findall(r"\w+", text)) if problem.imports else set()
        imports = [statement for statement in problem.imports if statement.split()[-1] in words]
        program = {"text": text, "imports": imports}
        if not problem.cases:
            job = {**program, "tests": problem.tests, "entry": problem.entry, "decides": decides}
            return self._judge_job(problem.name, job)
        for stdin, expected in problem.cases:
            job = {**program, "stdin": stdin, "expected": expected, "match": problem.match}
            verdict = self._judge_job(problem.name, job)
            if verdict != Verdict.PASSED:
                break
        return verdict

    def _judge_job(self, name: str, job: Mapping[str, Any]) -> Verdict:
        """A worker that dies of a program, or is killed meanwhile, is replaced, and the program gets one more try."""
        line = json.dumps(job).encode() + b"\n"
        for _ in range(2):
            if self._process.poll() is not None:
                self._start()
            reply = self._ask(line)
            if reply:
                verdict, state = reply
                if state == RETIRES:
                    self.stop()
                if verdict == UNTESTABLE:
                    raise UntestableError(
                        f"the tests of problem {name!r} hand the program a function or an object of their own, "
                        "which cannot reach it: have them use data, or what can be imported"
                    )
                return Verdict(verdict)
            self.stop()
            if reply is None:
                return Verdict.TIMEOUT
        return Verdict.RUNTIME_ERROR

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="headway-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            _command(self.isolation, self._limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder.name,
            env=_ENVIRONMENT,  # nothing of the caller's
            start_new_session=True,
        )
        if self._read(len(READY), _START_SECONDS) != READY:
            self._process.kill()
            _, stderr = self._process.communicate()
            last = stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it did not start"]
            raise IsolationError(last[0])

    def _ask(self, line: bytes) -> bytes | None:
        """The worker's two bytes; none if it ended, None if it is stuck although the judge must be done."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            return b""
        return self._read(2, self._limits.longest + _GRACE_SECONDS)

    def _read(self, size: int, seconds: float) -> bytes | None:
        assert self._process.stdout is not None
        poll = select.poll()
        poll.register(self._process.stdout, select.POLLIN)
        return self._process.stdout.read(size) if poll.poll(1000 * seconds) else None


def _packages() -> str:
    """The folder in which this interpreter finds numpy; empty: it has none."""
    spec = importlib.util.find_spec(kernel.PACKAGES[0])
    return str(Path(spec.origin).parents[1]) if spec and spec.origin else ""


def _command(isolation: str, limits: Limits) -> list[str]:
    """How to start a worker.

    Raises:
        IsolationError: that takes a program which is not installed.
    """
    interpreter = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
    python = [interpreter, "-S", "-s", "-P", "-B", "-c", _BOOT]
    packages = _packages()
    arguments = [
        isolation,
        json.dumps(limits),
        packages if isolation != "bubblewrap" else kernel.PACKAGES_FOLDER,
    ]
    package = Path(__file__).parents[1]
    if isolation != "bubblewrap":
        return [*python, str(package.parent), *arguments]
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise IsolationError("there is no program bwrap")
    shown = {
        path: path for path in (*kernel.folders(), interpreter, "/etc/ld.so.cache") if os.path.exists(path)
    }
    shown |= {
        str(package / "__init__.py"): "/code/rl/__init__.py",
        str(package / "programs"): "/code/rl/programs",
    }
    shown |= {source: target for target, source in kernel.shown_packages(packages).items()}
    return [
        *(bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *(word for source, target in shown.items() for word in ("--ro-bind", source, target)),
        *("--dev-bind", "/dev/null", "/dev/null", "--size", str(limits.output), "--tmpfs", kernel.FOLDER),
        *("--remount-ro", "/", "--chdir", kernel.FOLDER),
        *(*python, "/code", *arguments),
    ]
