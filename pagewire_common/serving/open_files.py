"""The limit on a process's open files; every connection is one."""

import contextlib
import resource


def raise_open_files_limit() -> None:
    """Raise the soft limit to the hard limit, as far as the system allows.

    The usual soft limit of 1,024 protects programs that call select(), which supports no larger file numbers; nothing
    here calls it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems report "unlimited" and allow less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
