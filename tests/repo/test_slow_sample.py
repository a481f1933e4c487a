"""The slow tests that .ci/run chooses by the commit's hash."""

from conftest import sample_of

TESTS = [f"tests/test_some.py::test_number[{n}]" for n in range(100)]


def test_a_sample_depends_on_the_seed_alone_and_may_be_a_share_of_the_tests():
    chosen = sample_of(TESTS, 12, "5a3b")
    assert len(set(chosen)) == 12
    assert sample_of(TESTS[::-1], 12, "5a3b") == chosen
    assert set(sample_of(TESTS, 12, "5a3c")) != set(chosen)
    with_another = sample_of([*TESTS, "tests/repo/test_new.py::test"], 12, "5a3b")
    assert len({*chosen} - {*with_another}) <= 1, "a new test displaces at most one"
    assert len(sample_of(TESTS, 0.25, "")) == 25
    assert sample_of(TESTS, 1000, "") == sample_of(TESTS, 100, "")
