"""A bounded run of the fuzzer of readers; the long one is run by hand (see `tests.fuzz_readers`)."""

from __future__ import annotations

from tests.fuzz_readers import SEEDS, case, fuzz, read


def test_mutated_files_of_every_format_are_read_or_refused(tmp_path) -> None:
    counts, failures = fuzz(30 * len(SEEDS), seed=0)
    assert not failures
    for kind in SEEDS:
        assert counts[kind, "refused"] + counts[kind, "read"] == 30
        assert counts[kind, "refused"] > 5, kind  # else the mutations change nothing that is looked at


def test_the_files_that_are_mutated_are_whole_ones(tmp_path) -> None:
    for kind, (name, make) in SEEDS.items():
        (tmp_path / name).write_bytes(make())
        assert read(tmp_path / name) == "read", kind


def test_a_file_of_a_seed_is_always_the_same() -> None:
    assert [case(1, n) for n in range(28)] == [case(1, n) for n in range(28)]
    assert case(1, 3) != case(2, 3)
