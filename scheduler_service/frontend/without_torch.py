"""Imported before transformers, this keeps torch out of the process.

For a tokenizer transformers would load torch wherever it finds it: 3.0 s and 459 MiB instead of 0.9 and 126.
"""

import os
import sys

sys.modules["torch"] = None  # type: ignore[assignment]
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that there is none
