"""The slow tests that .ci/run chooses by the commit's hash."""

from conftest import sample_of

TESTS = [f"tests/test_some.py::test_number[{n}]" for n in range(100)]


def test_a_sample_depends_on_the_seed_and_not_on_the_order_of_the_tests():
    chosen = sample_of(TESTS, 12, "5a3b")
    assert len(set(chosen)) == 12
    assert sample_of(TESTS[::-1], 12, "5a3b") == chosen
    assert set(sample_of(TESTS, 12, "5a3c")) != set(chosen)


def test_a_test_that_is_added_displaces_at_most_one_of_the_sample():
    assert (
        len(
            {*sample_of(TESTS, 12, "5a3b")}
            - {*sample_of([*TESTS, "tests/test_new.py::test"], 12, "5a3b")}
        )
        <= 1
    )


def test_below_1_the_amount_is_a_share_of_the_tests():
    assert len(sample_of(TESTS, 0.25, "")) == 25
    assert sample_of(TESTS, 1000, "") == sample_of(TESTS, 100, "")
