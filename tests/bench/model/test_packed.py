"""Reads what llama.cpp's benchmark prints."""

import json
import sys
from pathlib import Path

import pytest

from bench.model.packed import llama_cpp


def test_rates_are_of_all_streams_and_of_the_whole_time(tmp_path: Path) -> None:
    line = json.dumps({"pp": 128, "tg": 100, "pl": 8, "speed_pp": 512.5, "speed_tg": 300.0, "t": 4.0})
    program = tmp_path / "llama-batched-bench"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nasked = ' '.join(sys.argv)\n"
        "assert '-c 1824 ' in asked and '-npp 128 -ntg 100 -npl 8 ' in asked, asked\n"
        f"print('main: n_kv_max = 1824')\nprint('{line}')\n"
    )
    program.chmod(0o755)
    assert llama_cpp(program, tmp_path / "model.gguf", 8, 128, 100) == (pytest.approx(200), 512.5)
