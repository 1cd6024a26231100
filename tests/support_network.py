"""A command that may not use the network: `python tests/support_network.py snakemake ...`.

A filter of the kernel's (seccomp) ends each process that asks for a socket of IPv4: the command itself, whatever it
starts, and libraries in any language. It is loud: nothing can try and go on without. Sockets of other kinds than those
within a machine are refused; of these libraries ask for one of IPv6 when they are loaded, to see whether there is IPv6.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

SOCKET = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"By machine: how seccomp calls it (AUDIT_ARCH of linux/audit.h), and the number of its system call `socket`."
WITHIN = (socket.AF_UNIX, socket.AF_NETLINK)
"Sockets between processes, and those by which the kernel is asked what interfaces there are."
OUTSIDE = socket.AF_INET
"Who asks for a name's address, or connects to one, needs it first or last."

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
"Instructions of linux/bpf_common.h: load a word, compare it with a constant, return a constant."
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EAFNOSUPPORT
"SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS and SECCOMP_RET_ERRNO of linux/seccomp.h."
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"Where struct seccomp_data has them; the lower half of the argument comes first on both machines."
NO_NEW_PRIVILEGES, SET_SECCOMP, MODE_FILTER = 38, 22, 2
"Of linux/prctl.h. The first is what a filter of somebody who is not root asks for."


class Program(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def program() -> bytes:
    """The filter. A comparison goes on behind as many instructions as its third and fourth number say."""
    architecture, number = SOCKET[platform.machine()]
    return b"".join(
        struct.pack("HBBI", *line)
        for line in [
            (LOAD, 0, 0, ARCHITECTURE),
            (EQUAL, 1, 0, architecture),
            (RETURN, 0, 0, KILL),  # a process of another architecture would number its calls differently
            (LOAD, 0, 0, NUMBER),
            (EQUAL, 0, 6, number),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (EQUAL, 4, 0, WITHIN[0]),
            (EQUAL, 3, 0, WITHIN[1]),
            (EQUAL, 1, 0, OUTSIDE),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, KILL),
            (RETURN, 0, 0, ALLOW),
        ]
    )


def deny() -> None:
    """From now on, for this process and all that it starts."""
    lines = program()
    libc = ctypes.CDLL(None, use_errno=True)
    asked = Program(len(lines) // 8, lines)
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0, 0, 0), (SET_SECCOMP, MODE_FILTER, ctypes.byref(asked), 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


if __name__ == "__main__":
    deny()
    os.execvp(sys.argv[1], sys.argv[1:])
