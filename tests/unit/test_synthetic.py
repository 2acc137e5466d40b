"""Made-up records: the same for ever, of the right shape, all different."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.synthetic import SyntheticSource


def test_records_have_the_shape_and_the_labels_that_were_asked_for() -> None:
    source = SyntheticSource(200, 9, 3, 10, seed=1)
    records = [source[index] for index in range(len(source))]
    assert len(records) == 200
    assert {np.shape(record.image) for record in records} == {(9, 9, 3)}
    assert {record.label for record in records} == set(range(10))
    assert len({bytes(record.image) for record in records}) == 200
    assert np.mean([record.image for record in records]) == pytest.approx(127.5, abs=1)


def test_records_are_a_function_of_seed_and_number() -> None:
    one, again = (SyntheticSource(10, 8, 1, 5, seed=3)[7] for _ in range(2))
    assert bytes(one.image) == bytes(again.image)
    assert one.label == again.label
    assert bytes(SyntheticSource(10, 8, 1, 5, seed=4)[7].image) != bytes(one.image)


def test_sources_that_differ_have_different_fingerprints() -> None:
    given = [(10, 8, 1, 5, 0), (11, 8, 1, 5, 0), (10, 9, 1, 5, 0), (10, 8, 3, 5, 0)]
    given += [(10, 8, 1, 5, 1)]
    assert len({SyntheticSource(*values).fingerprint for values in given}) == 5


@pytest.mark.parametrize("index", [-1, 10])
def test_a_record_that_does_not_exist_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        SyntheticSource(10, 8, 1, 5)[index]
