"""Namespaces, mounts and users of the sandbox, by way of the C library; loaded by `sandbox_child.py` alone.

Constants of the kernel's interface are spelled out because Python 3.11 has no names for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import sys
from typing import Any

NEWNS, NEWUTS, NEWIPC, _NEWUSER, NEWPID, NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 1 << 14, 1 << 18
PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
CAPABILITY_VERSION = 0x20080522
_FIRST_UID = 0x20000000
"""Users from here on exist nowhere: one that is picked by process id owns no file and no other process."""
_NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> bool:
    """Leave some namespaces for new ones; whether the system allowed it."""
    return bool(libc.unshare(flags) == 0)


def own_users(uid: int, gid: int) -> bool:
    """A user namespace in which there is this user and nobody else."""
    # A process that has changed its user may not write its own maps until it says that it has no secrets.
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    if not unshare(_NEWUSER):
        return False
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        return False
    return True


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> bool:
    """`mount(2)`; whether the system allowed it."""
    done = libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode())
    return bool(done == 0)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]  # ctypes


def close_disk(job: dict[str, Any], root: bool) -> bool:
    """Nothing can be written any more but in the scratch folder, which is memory of a fixed size."""
    if not mount("none", "/", "none", _MS_REC | _MS_PRIVATE):
        return False
    if root:
        _move_libraries(job["libraries"])
    attributes = _MountAttributes(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    if libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), size) != 0:
        return False
    mode = 0o777 if root else 0o700
    return mount("tmpfs", job["scratch"], "tmpfs", MS_NOSUID | MS_NODEV, f"size={job['disk_bytes']},mode={mode:o}")


def _open_to_all(path: str, rights: int = stat.S_IROTH | stat.S_IXOTH) -> bool:
    """Whether a user that is in no group has these rights to a folder, and comes through to it."""
    place = os.path.realpath(path)
    while os.stat(place).st_mode & rights == rights:
        if place == os.path.dirname(place):
            return True
        place, rights = os.path.dirname(place), stat.S_IXOTH
    return False


def _move_libraries(folder: str) -> None:
    """Show the interpreter's modules in a place that others than root can reach, where they lie in a closed one."""
    closed = [path for path in sys.path if os.path.isdir(path) and not _open_to_all(path)]
    if not closed or not mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755"):
        return
    moved = {}
    for index, path in enumerate(closed):
        target = os.path.join(folder, str(index))
        os.mkdir(target, 0o755)
        if mount(path, target, "none", _MS_BIND | _MS_REC):
            moved[path] = target

    def new(path: str) -> str:
        origin = max((old for old in moved if path == old or path.startswith(old + os.sep)), key=len, default=None)
        return path if origin is None else moved[origin] + path[len(origin) :]

    sys.path[:] = [new(path) for path in sys.path]
    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__path__", None), list):
            module.__path__ = [new(path) for path in module.__path__]
    sys.path_importer_cache.clear()


def become_nobody(job: dict[str, Any]) -> bool:
    """Become a user that owns nothing; not if the modules or the scratch folder would be out of reach then."""
    if not all(_open_to_all(path) for path in sys.path if os.path.isdir(path)):
        return False
    if not _open_to_all(os.path.dirname(job["scratch"]), stat.S_IXOTH):
        return False
    for uid in (_FIRST_UID + job["number"], _NOBODY):
        with contextlib.suppress(OSError):
            os.chown(job["scratch"], uid, uid)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            return True
    return False
