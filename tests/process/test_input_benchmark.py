"""The benchmark of decode processes runs small: a step beside one, and beside a bare process."""

from __future__ import annotations

from tests.harness.documents.benchmark_runs import LIMIT, benchmark


def test_a_step_beside_a_decode_process_and_beside_a_bare_one() -> None:
    with benchmark("input.py", "--quick", "--sections", "step", "--rounds", "1") as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, out + err
    *_, ours, bare = out.strip().splitlines()
    assert ours.startswith("beside a decode process")
    assert bare.startswith("beside a bare process")
    assert float(bare.split()[-1]) > 0
