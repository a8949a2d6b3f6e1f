"""What a process asks of the Linux kernel before it runs code that nobody vouches for; standard library only.

`enter_namespaces` leaves the machine behind: its files, network and processes. `confinement` gives up, for good,
whatever would let one process harm another in the same sandbox. Both act on the calling process and what it forks.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

FOLDER = "/tmp"  # the one writable folder of a sandbox
MIB = 1 << 20

_SETATTR_FIRST = (5, 12)  # the Linux that brought mount_setattr
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NOSUID_NODEV_NOEXEC, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 2 | 4 | 8, 4096, 16384, 1 << 18, 2
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVILEGES = 1, 4, 22, 38

# System calls that a confined process does without, by name: numbers on x86-64 and on AArch64 (-1: it has none).
_DENIED: dict[str, tuple[int, int]] = {
    # one process with one thread, which stays what it is and leaves others alone
    "clone": (56, 220),
    "fork": (57, -1),
    "vfork": (58, -1),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "prlimit64": (302, 261),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    # no network, not even within the machine
    "socket": (41, 198),
    "socketpair": (53, 199),
    # no way around the limits: memory and messages that outlive a process or belong to none
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # no other file system, no other namespace
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    # the parts of the kernel that most often turned out to have holes; io_uring also evades this very filter
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of _DENIED, audit number


def folders() -> list[str]:
    """The folders that a Python without packages reads: its standard library and the system's shared libraries."""
    # Not a virtual environment's, which lies among the caller's files.
    base = {"platbase": sys.base_exec_prefix}
    found = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib", vars=base),
        f"{sys.base_prefix}/lib",
    ]
    found += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"]
    existing = sorted({path for path in found if os.path.isdir(path)}, key=len)
    return [
        path for i, path in enumerate(existing) if not path.startswith(tuple(p + "/" for p in existing[:i]))
    ]


def enter_namespaces(folder_size: int) -> None:
    """Return in a new process that sees no other, no network, and of the files only `folders`, read-only.

    The calling process stays behind, waits for the new one and ends with it. ``FOLDER`` is a new, empty file system
    of ``folder_size`` bytes in memory. All capabilities are gone afterwards.

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
    _change_root(folder_size)
    _drop_capabilities()


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _call("prctl", _SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def confinement(seconds: int, memory: int, output: int) -> Callable[[], None]:
    """What a process calls to have one thread, so much memory and processor time, and no one to inspect it.

    From then on it is an error (``EPERM``) to start a process or thread, to signal or inspect a process, to open a
    socket, and to make any other system call in ``_DENIED``. Made before a fork, so that forks share what it needs.

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
        _call("prctl", _SET_SECCOMP, 2, filters, 0, 0)

    return confine


def _change_root(folder_size: int) -> None:
    sources = {path: os.path.realpath(path) for path in [*folders(), "/dev/null"]}
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
    _mount("tmpfs", FOLDER, "tmpfs", _NOSUID_NODEV_NOEXEC, f"size={folder_size},nr_inodes=1024,mode=700")
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
    """A classic BPF program over ``struct seccomp_data``: the denied numbers return EPERM, all others run."""
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(
            f"there is no system-call filter for {machine}, only for {' and '.join(_ARCHITECTURES)}"
        )
    column, audit = _ARCHITECTURES[machine]
    numbers = [numbers[column] for numbers in _DENIED.values() if numbers[column] >= 0]
    load, equal, at_least, finish = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | 1, 0x80000000
    program = [
        (load, 0, 0, 4),  # the architecture, then the number of the call
        (equal, 1, 0, audit),
        (finish, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, len(numbers) + 1, 0, 0x40000000),  # x32, a second numbering of the same calls
        *((equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)),
        (finish, 0, 0, allow),
        (finish, 0, 0, refuse),
    ]
    return _Filter(len(program), b"".join(struct.pack("HBBI", *line) for line in program))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode())


def _system_call(number: dict[str, int], *arguments: int | bytes) -> None:
    """For the calls that have no function in every C library."""
    _call("syscall", number[os.uname().machine], *arguments)


def _call(name: str, *arguments: Any) -> None:
    long = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    if getattr(_LIBC, name)(*long) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


_LIBC = ctypes.CDLL(None, use_errno=True)
