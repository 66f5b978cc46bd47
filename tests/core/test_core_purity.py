"""The core may import the standard library only: it must be testable, and fast, without anything else."""

import subprocess
import sys

SCRIPT = """
import sys

LOGGING = {"logging", "structlog"}  # a line a step, formatted whether or not it is kept, once cost 9 ms

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"asyncio", "google", "grpc", "pagewire", "torch", "transformers"} | LOGGING:
            raise ImportError(f"the core imports {name}")

sys.meta_path.insert(0, Refuse())
import scheduler_service.core
assert not {"asyncio", "socket", "time"} & {
    name for module in list(sys.modules) if module.startswith("scheduler_service.core")
    for name in vars(sys.modules[module])
}
"""


def test_core_imports_without_grpc_protobuf_torch_asyncio_clock_or_logging() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
