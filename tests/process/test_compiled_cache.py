"""What numba compiles is found by the next process, unless a file of its cache is torn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.processes.python_program import ROOT

_PROGRAM = """
import sys
from pathlib import Path
from paceline.comm.numba_compiler import compiler
from source import twice

def found():
    compiled = compiler()(twice)  # as a new process would
    assert compiled(21) == 42
    print("found", sum(compiled.stats.cache_hits.values()))

found()
for number, name in enumerate(sys.argv[2:]):
    (file,) = Path(sys.argv[1]).rglob(name)
    file.write_bytes(file.read_bytes()[: number * file.stat().st_size // 2])
    found()
    found()
"""


def test_the_next_process_finds_what_one_compiled_and_a_torn_file_is_made_anew(
    tmp_path: Path,
) -> None:
    (tmp_path / "source.py").write_text("def twice(x):\n    return 2 * x\n")
    cache = tmp_path / "cache"
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(cache),
        "NUMBA_DEBUG_CACHE": "1",  # it prints what it finds and saves
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
    }

    def lookups(*torn: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(cache), *torn],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert ended.returncode == 0, ended.stderr
        output.append(ended.stdout)
        return [line for line in ended.stdout.splitlines() if line.startswith("found")]

    output: list[str] = []
    assert lookups() == ["found 0"], output
    index, code = "*.nbi", "*.nbc"
    made_anew = ["found 0", "found 1"]
    assert lookups(index, code) == ["found 1", *made_anew, *made_anew], output
