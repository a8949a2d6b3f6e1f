"""The inside of a sandbox: judges one program after another; standard library only.

A *zygote* forks two processes for every job, so that a job costs two forks and not an interpreter's start. One runs
the program and sees nothing else (`rl.programs.execute`): not the tests, not the job, not what came before. The other,
the *judge*, reads the job, hands over the program's text, and executes the tests; to them the program's functions are
stand-ins (`rl.programs.remote`). The verdict is the judge's exit status. A program can therefore patch, print and exit
as it likes: all that reaches its tests are its answers, and they are compared where it is not. What a script printed is
compared with what was expected (`rl.programs.outputs`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any, BinaryIO

from rl.programs import execute, kernel, wire
from rl.programs.outputs import MATCHES
from rl.programs.remote import HandOverError, Program, ProgramError
from rl.programs.verdicts import SHARES, UNTESTABLE, Limits, Verdict

# What programs import all the time is loaded before the fork.
_COMMON = "bisect collections copy datetime functools heapq itertools math operator random re string typing"
READY = b"R"
GOES_ON, RETIRES = 0, 1  # whether the worker takes another job
_END = 1  # the judge's exit status for "there are no more jobs"
_FIRST_VERDICT = 64  # and for the first verdict


def main(isolation: str, limits: str, packages: str) -> None:
    """Serve jobs, JSON objects of one line each on stdin, until stdin ends or `RETIRES` was said.

    A job has the program's ``text`` and statements to execute before it, ``imports``, the text of its ``tests``, the
    names that the tests take from the program, ``entry``, and whether its objects decide how they compare, ``decides``
    (`rl.programs.remote.Remote`). Of a script it has instead of the last three its input, ``stdin``, the ``expected``
    output and one of `rl.programs.outputs.MATCHES`, ``match``. stdout carries `READY`, then two bytes for each job: a
    `Verdict` or `UNTESTABLE`, and whether this goes on.

    Args:
        isolation: ``namespaces``: enter them first. Otherwise whoever started this has seen to it.
        limits: `Limits` as a JSON array.
        packages: the folder of `kernel.PACKAGES`; empty: none are there.
    """
    bounds = Limits(*json.loads(limits))
    confine = kernel.confinement(bounds.seconds, bounds.memory, bounds.output)
    if isolation == "namespaces":
        packages = kernel.enter_namespaces(bounds.output, packages)
    if packages:
        sys.meta_path.append(_Packages(packages))
    for name in _COMMON.split():
        importlib.import_module(name)
    for what in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(what, signal.SIG_DFL)  # a process that ignores them hands that on to what it starts
    sys.set_int_max_str_digits(0)
    null = os.open(os.devnull, os.O_RDWR)
    verdicts = os.dup(1)
    os.write(verdicts, READY)
    for standard in (1, 2):
        os.dup2(null, standard)
    os.close(null)  # or every program would have it, with the flags that the last one gave it
    gc.collect()
    gc.freeze()  # the garbage collector of a fork leaves the pages that it shares alone
    untouched = _times(".")
    while (verdict := _run_job(bounds, confine, verdicts)) is not None:
        # A program that left anything behind, if only a mode or a time, must not speak to the next one or hinder it:
        # that gets a new folder.
        state = GOES_ON if _times(".") == untouched else RETIRES
        os.write(verdicts, bytes([verdict, state]))
        if state == RETIRES:
            return


class _Packages:
    """Finds `kernel.PACKAGES` in a folder, and nothing that lies beside them."""

    def __init__(self, folder: str):
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return (
            PathFinder.find_spec(name, [self._folder]) if path is None and name in kernel.PACKAGES else None
        )


def _run_job(limits: Limits, confine: Callable[[], None], verdicts: int) -> int | None:
    """The verdict on the next job or `UNTESTABLE`, or None if there is none."""
    questions, answers = os.pipe(), os.pipe()

    def program() -> None:
        for descriptor in (questions[1], answers[0], verdicts):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDWR)  # a descriptor's flags are everyone's who shares it
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        os.close(null)
        random.seed(0)
        streams = os.fdopen(questions[0], "rb"), os.fdopen(answers[1], "wb")
        execute.run(limits, confine, *streams)

    def judge() -> None:
        for descriptor in (questions[0], answers[1], verdicts):
            os.close(descriptor)
        streams = os.fdopen(0, "rb"), os.fdopen(questions[1], "wb"), os.fdopen(answers[0], "rb")
        _judge(limits, confine, running, *streams)

    running = _fork(program)
    judging = _fork(judge)
    for descriptor in (*questions, *answers):
        os.close(descriptor)
    _, judged = os.waitpid(judging, 0)
    os.kill(running, signal.SIGKILL)
    _, ended, used = os.wait4(running, 0)
    if os.waitstatus_to_exitcode(judged) == _END:
        return None
    return _verdict(judged, ended, used.ru_utime + used.ru_stime >= limits.seconds)


def _verdict(judged: int, ended: int, spent: bool) -> int:
    """What the judge found, unless time ran out.

    Args:
        judged: how the judge ended, as by ``waitpid``.
        ended: how the program ended.
        spent: whether the program had used up its processor time.
    """
    code = os.waitstatus_to_exitcode(judged)
    if code > _FIRST_VERDICT + Verdict.RUNTIME_ERROR or code == _FIRST_VERDICT + Verdict.COMPILE_ERROR:
        return code - _FIRST_VERDICT
    late = -signal.SIGXCPU in (code, os.waitstatus_to_exitcode(ended))
    return Verdict.TIMEOUT if late or spent else Verdict.RUNTIME_ERROR


def _fork(body: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    try:
        kernel.die_with_parent()
        body()
    finally:
        os._exit(_FIRST_VERDICT + Verdict.RUNTIME_ERROR)


def _times(folder: str) -> tuple[int, int]:
    """When it was last read, and when it, its mode or anything else about it changed; zeros if it is inaccessible."""
    try:
        status = os.stat(folder)
    except OSError:
        return 0, 0
    return status.st_atime_ns, status.st_ctime_ns


# ---- the judge ----------------------------------------------------------------------------------------------


def _judge(
    limits: Limits,
    confine: Callable[[], None],
    process: int,
    jobs: BinaryIO,
    questions: BinaryIO,
    answers: BinaryIO,
) -> None:
    """Read a job for the program in a process and end with its verdict as exit status."""
    line = jobs.readline()
    if not line:
        os._exit(_END)
    _end_if_idle(limits, process)
    confine()
    job = json.loads(line)
    is_script = "stdin" in job  # whose one answer is all that it printed
    longest = limits.output * (wire.EXPANSION if is_script else 1)
    program = Program(questions, answers, longest, job.pop("decides", False))
    verdict = _test_script(program, **job) if is_script else _test(program, **job)
    os._exit(_FIRST_VERDICT + verdict)


def _end_if_idle(limits: Limits, process: int) -> None:
    """From now on, end this process by `Verdict.TIMEOUT` when it and another have mostly waited (`Limits`)."""
    before = time.process_time()

    def look(*_: object) -> None:
        nonlocal before
        used = time.process_time()
        with contextlib.suppress(OSError):  # the other one ended
            used += time.clock_gettime(~process << 3 | 2)  # as `clock_getcpuclockid` has it on Linux
        if used - before < limits.seconds / SHARES:
            os._exit(_FIRST_VERDICT + Verdict.TIMEOUT)
        before = used

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, limits.deadline, limits.deadline)


def _test(program: Program, *, text: str, imports: list[str], tests: str, entry: list[str]) -> int:
    if not program.compiles(text, imports):
        return Verdict.COMPILE_ERROR
    try:
        program.run()
        random.seed(tests)  # which the program has not seen, or it could draw what they draw
        exec(tests, {"__name__": "tests", **{name: program.take(name) for name in entry}})
    except HandOverError:
        return UNTESTABLE
    except BaseException as error:
        return Verdict.RUNTIME_ERROR if error is program.error else Verdict.FAILED
    return Verdict.RUNTIME_ERROR if program.is_gone else Verdict.PASSED


def _test_script(
    program: Program, *, text: str, imports: list[str], stdin: str, expected: str, match: str
) -> int:
    if not program.compiles(text, imports, stdin):
        return Verdict.COMPILE_ERROR
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            program.run()
    except ProgramError:
        return Verdict.RUNTIME_ERROR
    return Verdict.PASSED if MATCHES[match](printed.getvalue(), expected) else Verdict.FAILED
