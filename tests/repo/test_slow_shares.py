"""The shares of the slow tests that .ci/run runs in turn."""

from collections import Counter

from conftest import ROOT, SHARES, share_of

TESTS = [f"tests/test_some.py::test_number[{n}]" for n in range(1000)]


def test_ten_shares_hold_each_test_once_and_are_of_about_one_size():
    sizes = Counter(map(share_of, TESTS))
    assert sorted(sizes) == list(range(SHARES))
    assert all(70 < size < 130 for size in sizes.values()), sizes


def test_ci_runs_the_share_that_the_commit_names():
    assert '--slow-share "$(cat .ci/share)"' in (ROOT / ".ci/run").read_text()
    int((ROOT / ".ci/share").read_text())
