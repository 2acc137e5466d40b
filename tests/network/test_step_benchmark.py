"""The benchmark of a step measures links that are as slow as they are said to be."""

from __future__ import annotations

import re

from tests.harness.documents.benchmark_runs import carried, need_shaped_links, printed

TINY = ("--model", "resnet20", "--image-size", "8", "--batch", "2", "--rounds", "2", "--steps", "1")
ROWS = ("--rows", "floor", "ddp:1", "allreduce")


def test_a_plain_stream_carries_what_the_link_was_shaped_to() -> None:
    need_shaped_links()
    (rate,) = carried(printed("step.py", *TINY, *ROWS, "--links", "100mbit"))
    assert rate <= 0.1 * 1.25  # a burst of 256 kB goes free, of 1.3 MB


def test_a_link_that_can_t_be_made_is_a_sentence_and_the_others_are_measured() -> None:
    out = printed("step.py", *TINY, *ROWS, "--links", "1furlong", "loopback")
    assert re.search(r"^1furlong: not measured, as .*\.$", out, re.MULTILINE)
    assert re.search(r"^allreduce +\d+", out, re.MULTILINE)
