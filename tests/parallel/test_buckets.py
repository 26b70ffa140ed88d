"""The flat layout: pure arithmetic."""

import random

import pytest

from olmo_shard.parallel.buckets import Piece, make_buckets, pieces


def test_the_documented_example():
    buckets = make_buckets({"a": 100, "b": 200, "c": 70}, group_size=2, cap=350)
    assert [(b.start, b.end) for b in buckets] == [(0, 384), (384, 512)]
    assert [(s.name, s.start) for s in buckets[0].spans] == [("c", 0), ("b", 128)]
    assert [(s.name, s.start) for s in buckets[1].spans] == [("a", 384)]
    assert [b.slice_of(0, 2) for b in buckets] == [(0, 192), (384, 448)]
    assert [b.slice_of(1, 2) for b in buckets] == [(192, 384), (448, 512)]
    # rank 0's slice ends at 192, inside b, which starts at 128
    assert pieces(buckets[0], 0, 2) == [
        Piece(name="c", start=0, offset=0, numel=70),
        Piece(name="b", start=128, offset=0, numel=64),
    ]
    assert pieces(buckets[0], 1, 2) == [Piece(name="b", start=192, offset=64, numel=136)]


def test_a_parameter_beyond_the_cap_is_a_bucket_of_its_own():
    buckets = make_buckets({"a": 10, "big": 5000, "z": 10}, group_size=2, cap=100)
    assert [[s.name for s in b.spans] for b in buckets] == [["z"], ["big"], ["a"]]


@pytest.mark.parametrize("group_size", [1, 2, 3, 7, 8])
def test_every_element_has_one_owner(group_size):
    draw = random.Random(group_size)
    sizes = {f"p{i}": draw.choice([1, 3, 63, 64, 65, 1000, 4097]) for i in range(40)}
    buckets = make_buckets(sizes, group_size, cap=3000)
    owners: dict[str, list[int]] = {name: [0] * numel for name, numel in sizes.items()}
    previous_end = 0
    for bucket in buckets:
        assert bucket.start == previous_end
        previous_end = bucket.end
        assert (bucket.end - bucket.start) % group_size == 0
        assert (bucket.end - bucket.start) % 128 == 0
        assert all(span.start % 64 == 0 for span in bucket.spans)
        for rank in range(group_size):
            low, high = bucket.slice_of(rank, group_size)
            for piece in pieces(bucket, rank, group_size):
                assert low <= piece.start
                assert piece.start + piece.numel <= high
                for element in range(piece.offset, piece.offset + piece.numel):
                    owners[piece.name][element] += 1
    assert all(set(counts) == {1} for counts in owners.values())
