"""How many files a process may have open; every connection is one."""

import contextlib
import resource


def raise_open_files_limit() -> None:
    """Raise the soft limit to the hard limit, as far as the system allows.

    The usual soft limit of 1,024 is for programs that call select(), which know no file numbers beyond it; nothing here
    does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems report "unlimited" and allow less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
