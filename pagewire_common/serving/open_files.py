"""Raises the limit on a process's open files. Every connection is an open file."""

import contextlib
import resource


def raise_open_files_limit() -> None:
    """Raise the soft limit to the hard limit: the usual 1,024 protects only programs that call select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems report "unlimited", but refuse this value
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
