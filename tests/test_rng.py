from __future__ import annotations

import itertools

from cbdsl.rng import seed_of, stream


def test_a_stream_depends_on_its_name_alone() -> None:
    first = stream(1, "batches", 2, 3).random(4)
    stream(1, "attack").random(100)
    assert (stream(1, "batches", 2, 3).random(4) == first).all()


def test_streams_with_different_names_differ() -> None:
    names = itertools.product([0, 1], ["batches", "attack"], [1, 11], [1, 11])
    drawn = {stream(seed, purpose, number, worker).integers(2**62) for seed, purpose, number, worker in names}  # type: ignore[arg-type]
    assert len(drawn) == 16


def test_the_streams_are_the_same_on_every_machine_and_in_every_release() -> None:
    assert stream(0, "partition").integers(0, 1000, 5).tolist() == EXPECTED
    assert seed_of(0, "layers", 1, 2) == seed_of(0, "layers", 1, 2)


EXPECTED = [913, 73, 824, 277, 260]
