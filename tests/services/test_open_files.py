"""A service may have as many files open as the system lets it."""

import resource

from pagewire_common.serving.server import run


def test_a_service_raises_its_soft_limit_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = []

    async def main() -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))

    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        run("service", main)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert seen == [(hard, hard)]
