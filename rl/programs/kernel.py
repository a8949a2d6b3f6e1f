"""What a process asks of the Linux kernel before it runs code that nobody vouches for; standard library only.

`enter_namespaces` leaves the machine behind: its files, network and processes. `confinement` gives up, for good,
whatever would let one process harm another in the same sandbox. Both act on the calling process and what it forks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

FOLDER = "/tmp"  # the one writable folder of a sandbox
PACKAGES = ("numpy", "numpy.libs")  # beyond the standard library, where the caller has them
PACKAGES_FOLDER = "/packages"
MIB = 1 << 20

_SETATTR_FIRST = (5, 12)  # the Linux that brought mount_setattr
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NOSUID_NODEV_NOEXEC, _NOATIME = 2 | 4 | 8, 1024
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_NO_NEW_PRIVILEGES = 1, 4, 38
_SET_FILTER, _ALL_THREADS = 1, 1

# What a confined process may ask of the kernel, by name: numbers on x86-64 and on AArch64 (-1: it has none). Everything
# else is refused, what future kernels bring included.
_ALLOWED: dict[str, tuple[int, int]] = {
    # files that it may see: the paths are the sandbox's affair
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    "lseek": (8, 62),
    "open": (2, -1),
    "creat": (85, -1),
    "openat": (257, 56),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, -1),
    "dup3": (292, 24),
    "pipe": (22, -1),
    "pipe2": (293, 59),
    "stat": (4, -1),
    "lstat": (6, -1),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, -1),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, -1),
    "readlinkat": (267, 78),
    "getdents": (78, -1),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "mkdir": (83, -1),
    "mkdirat": (258, 34),
    "rmdir": (84, -1),
    "unlink": (87, -1),
    "unlinkat": (263, 35),
    "rename": (82, -1),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "link": (86, -1),
    "linkat": (265, 37),
    "symlink": (88, -1),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "fadvise64": (221, 223),
    "umask": (95, 166),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    # its own memory
    "brk": (12, 214),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "msync": (26, 227),
    # its own signals, clocks and threads
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "signalfd4": (289, 74),
    "pause": (34, -1),
    "alarm": (37, -1),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, -1),
    "times": (100, 153),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
    "membarrier": (324, 283),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # waiting
    "poll": (7, -1),
    "ppoll": (271, 73),
    "select": (23, -1),
    "pselect6": (270, 72),
    "epoll_create": (213, -1),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, -1),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd2": (290, 19),
    "wait4": (61, 260),
    "waitid": (247, 95),
    # the two ends of a `socketpair`
    "recvfrom": (45, 207),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "getsockopt": (55, 209),
    "shutdown": (48, 210),
    # what it is told about itself and the machine
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgrp": (111, -1),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getpriority": (140, 141),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getrandom": (318, 278),
    "getcpu": (309, 168),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
}
# Allowed with some arguments only. Each choice: the values of 32-bit words, of which argument i has 2i (the lower half)
# and 2i + 1. Where the kernel reads an int, the upper half means nothing.
_ALLOWED_WITH: list[tuple[str, tuple[int, int], dict[int, tuple[int, ...]]]] = [
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC: no lease or lock on a file that others open, no
    # signal to whoever is named as a descriptor's owner, no larger pipe
    ("fcntl", (72, 25), {2: (0, 1, 2, 3, 4, 1030)}),
    # TCGETS (twice), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    ("ioctl", (16, 29), {2: (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)}),
    ("prctl", (157, 167), {0: (15, 16)}),  # PR_SET_NAME and PR_GET_NAME, of threads
    # of this process: read any limit, change that of the stack, which the address space bounds
    ("prlimit64", (302, 261), {0: (0,), 4: (0,), 5: (0,)}),
    ("prlimit64", (302, 261), {0: (0,), 2: (3,)}),
    # event loops wake themselves by a pair of local streams; nothing is sent to an address
    ("socketpair", (53, 199), {0: (1,), 2: (1, 1 | 0o4000, 1 | 0o2000000, 1 | 0o2004000)}),
    ("sendto", (44, 206), {8: (0,), 9: (0,)}),
]
# Done, says the filter, and nothing is.
_PRETENDED = {
    # nothing here outlives the process
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    # modes and times of files are of use to nobody, and /dev/null is the machine's, also where bubblewrap shows it
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
}
_NEWEST_REFUSED = {"x86_64": 334, "aarch64": 293}  # of Linux 4.18; of later numbers libraries expect ENOSYS
_ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # column of the numbers, audit number


def folders() -> list[str]:
    """The folders that a Python without packages reads: its standard library and the system's shared libraries."""
    # Not a virtual environment's, which lies among the caller's files.
    base = {"platbase": sys.base_exec_prefix}
    candidates = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib", vars=base),
        f"{sys.base_prefix}/lib",
    ]
    candidates += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"]
    existing = sorted({path for path in candidates if os.path.isdir(path)}, key=len)
    return [
        path for i, path in enumerate(existing) if not path.startswith(tuple(p + "/" for p in existing[:i]))
    ]


def shown_packages(folder: str) -> dict[str, str]:
    """Where a sandbox sees each of `PACKAGES` that this folder has: its path there to the real one."""
    paths = {f"{PACKAGES_FOLDER}/{name}": f"{folder}/{name}" for name in PACKAGES if folder}
    return {shown: os.path.realpath(path) for shown, path in paths.items() if os.path.isdir(path)}


def enter_namespaces(folder_size: int, packages: str) -> str:
    """Return in a new process that sees no other, no network, and of the files only `folders`, read-only.

    The calling process stays behind, waits for the new one and ends with it. ``FOLDER`` is a new, empty file system
    of ``folder_size`` bytes in memory. All capabilities are gone afterwards.

    Args:
        folder_size: bytes.
        packages: the folder of `PACKAGES`, which are seen too; empty: none are.

    Returns:
        Where they are seen, or nothing.

    Raises:
        OSError: this kernel, or whatever confines this process already, does not allow it.
    """
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < _SETATTR_FIRST:
        raise OSError(f"Linux {os.uname().release} is older than {'.'.join(map(str, _SETATTR_FIRST))}")
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NAMESPACES)
    for name, line in {
        "setgroups": "deny",
        "uid_map": f"{user} {user} 1",
        "gid_map": f"{group} {group} 1",
    }.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    inner = os.fork()
    if inner:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) and 1)
    die_with_parent()
    _change_root(folder_size, shown_packages(packages))
    _drop_capabilities()
    return PACKAGES_FOLDER if packages else ""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def confinement(seconds: int, memory: int, output: int) -> Callable[[], None]:
    """What a process calls to have one thread, this much memory and processor time, and no one to inspect it.

    From then on every system call is an error that ``_ALLOWED`` and the like do not name, among them whatever starts a
    process or thread, signals or inspects a process, locks a file or opens a socket: ``EPERM``, and ``ENOSYS`` for what
    came after Linux 4.18, which libraries do without. Made before a fork, so that forks share what it needs.

    Args:
        seconds: of processor time, to the signal SIGXCPU; another one to the end.
        memory: bytes of address space.
        output: bytes of the largest file it may write.

    Raises:
        OSError: this machine's system calls are not known here.
    """
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (output, output),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_NPROC: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    filters = ctypes.byref(_system_call_filter())

    def confine() -> None:
        for what, bounds in limits.items():
            resource.setrlimit(what, bounds)
        _call("prctl", _SET_DUMPABLE, 0, 0, 0, 0)
        _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _system_call({"x86_64": 317, "aarch64": 277}, _SET_FILTER, _ALL_THREADS, filters)  # seccomp

    return confine


def _change_root(folder_size: int, packages: dict[str, str]) -> None:
    sources = {path: os.path.realpath(path) for path in [*folders(), "/dev/null"]} | packages
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", FOLDER, "tmpfs", 0, "size=1m,mode=755")
    os.mkdir(f"{FOLDER}/old")
    _system_call({"x86_64": 155, "aarch64": 41}, FOLDER.encode(), f"{FOLDER}/old".encode())  # pivot_root
    os.chdir("/")
    for path, source in sources.items():
        if os.path.isdir(f"/old{source}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT))
        _mount(f"/old{source}", path, None, _BIND | _RECURSIVE)
    _call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    os.makedirs(FOLDER, exist_ok=True)
    read_only = struct.pack("QQQQ", 1 | 2, 0, 0, 0)  # mount_attr: set RDONLY and NOSUID, clear nothing
    here, recursive = -100, 0x8000
    _system_call(
        {"x86_64": 442, "aarch64": 442}, here, b"/", recursive, read_only, len(read_only)
    )  # mount_setattr
    # Nothing keeps the time at which it was last read, which one program could tell the next one by.
    flags = _NOSUID_NODEV_NOEXEC | _NOATIME
    _mount("tmpfs", FOLDER, "tmpfs", flags, f"size={folder_size},nr_inodes=1024,mode=700")
    os.chdir(FOLDER)


def _drop_capabilities() -> None:
    """Empty all three sets; without them, and with no way to gain privileges, the bounding set means nothing."""
    version_3 = struct.pack("Ii", 0x20080522, 0)
    _call("capset", version_3, bytes(24))
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


class _Filter(ctypes.Structure):
    """``struct sock_fprog``."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def _system_call_filter() -> _Filter:
    """A classic BPF program over ``struct seccomp_data``: what `_ALLOWED` and the like do not name is refused."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(
            f"there is no system-call filter for {machine}, only for {' and '.join(_ARCHITECTURES)}"
        )
    column, audit = _ARCHITECTURES[machine]
    load, equal, greater, finish = 0x20, 0x15, 0x25, 0x06
    allow, error, kill = 0x7FFF0000, 0x00050000, 0x80000000
    number_at, words_at = 0, 16
    program = [
        (load, 0, 0, 4),  # the architecture, then the number of the call
        (equal, 1, 0, audit),
        (finish, 0, 0, kill),
        (load, 0, 0, number_at),
    ]
    for numbers, verdict in (
        *((numbers, allow) for numbers in _ALLOWED.values()),
        *((numbers, error) for numbers in _PRETENDED.values()),
    ):
        if numbers[column] >= 0:
            program += [(equal, 0, 1, numbers[column]), (finish, 0, 0, verdict)]
    for _, numbers, words in _ALLOWED_WITH:
        test: list[tuple[int, int, int, int]] = []
        for word, values in reversed(words.items()):
            # On a match to what follows these lines; otherwise behind the end of the whole test, where the number is
            # loaded again.
            lines = [(equal, len(values) - 1 - i, 0, value) for i, value in enumerate(values)]
            lines[-1] = (equal, 0, len(test) + 1, values[-1])
            test = [(load, 0, 0, words_at + 4 * word), *lines, *test]
        block = [*test, (finish, 0, 0, allow), (load, 0, 0, number_at)]
        program += [(equal, 0, len(block), numbers[column]), *block]
    program += [
        (greater, 0, 2, _NEWEST_REFUSED[machine]),
        (greater, 1, 0, 0x3FFFFFFF),  # x32, a second numbering of the same calls
        (finish, 0, 0, error | errno.ENOSYS),
        (finish, 0, 0, error | errno.EPERM),
    ]
    return _Filter(len(program), b"".join(struct.pack("HBBI", *line) for line in program))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode())


def _system_call(number: dict[str, int], *arguments: Any) -> None:
    """For the calls that have no function in every C library."""
    _call("syscall", number[os.uname().machine], *arguments)


def _call(name: str, *arguments: Any) -> None:
    long = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_LIBC, name)(*long) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


_LIBC = ctypes.CDLL(None, use_errno=True)
