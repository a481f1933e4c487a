"""What test_sources.py tests, with other features."""

import re
import textwrap
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from messages import message_of
from test_security import MASKED_ADDRESS
from test_sources import all_rows, in_memory, section, write
from test_sources_mixture import Tokens
from tiny import make_run, parameters_of, take_steps

from dist_amp.loading.length_groups import LengthGroups
from dist_amp.settings import DataConfig
from dist_amp.sources.files import file_system
from dist_amp.sources.load import load_split
from dist_amp.sources.mixture import Mixture
from dist_amp.world import World

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_task_in_the_docs_learns_from_any_of_these(tmp_path):
    page = (ROOT / "docs/data.md").read_text().split("## Larger")[0]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code, names)
    rows = [f"{n % 5},1,0.5,{n % 3},{n % 7}\n" for n in range(40)]
    write(tmp_path, {"rows.csv": "a,b,c,d,y\n" + "".join(rows)})
    run = make_run(World(), names["Table"](section(path=in_memory(tmp_path))))
    before = parameters_of(run)["weight"].clone()
    take_steps(run, 1)
    assert not torch.equal(parameters_of(run)["weight"], before)
    assert run.data.plan.length == 38


def test_the_windows_of_the_docs_are_of_neighbours_and_split_by_time(tmp_path):
    page = (ROOT / "docs/data.md").read_text()
    (example,) = re.findall(r"(?m)^    def build_dataset.*\n        prices .*\n.*\n", page)
    shown = {"load_split": load_split, "torch": torch}
    exec(textwrap.dedent(example), shown)
    write(tmp_path, {"prices.csv": "price\n" + "".join(f"{n / 2}\n" for n in range(100))})
    data = DataConfig(path=str(tmp_path), validation_split="last:0.1")
    task = SimpleNamespace(data=data, context=3)
    for split, first in {"train": range(87), "validation": range(90, 97)}.items():
        windows = shown["build_dataset"](task, split)
        assert windows.tolist() == [[(n + i) / 2 for i in range(4)] for n in first]


def test_rows_of_a_table_that_do_not_fit_its_header_can_be_left_out_and_are_named(tmp_path, caplog):
    path = tmp_path / "rows.csv"
    write(tmp_path, {"rows.csv": "text,n\nx,a,1\nb\nc,3\n"})
    for _ in range(2):  # read, and from the cache
        assert list(all_rows(path, on_bad_sample="skip")) == [{"text": "c", "n": 3}]
    assert f"fields: 2, row 2 of {path} (fields: 3), row 3 of {path} (fields: 1)" in caplog.text


def test_a_mixture_has_the_lengths_of_its_samples_so_that_they_can_be_grouped():
    mix = Mixture({"a": Tokens(6), "b": Tokens(4)}, [2, 1])
    expected = [len(sample["input_ids"]) for sample in mix]
    assert mix.lengths.tolist() == expected
    grouped = LengthGroups(mix, 2)
    order = grouped.shuffled(4, 1)[1](0, 0)(torch.arange(len(mix))).tolist()
    assert len(grouped.__getitems__(order)) == len(set(order)) == len(mix)


@pytest.mark.bad_input("a masked secret of a run's config.toml in data.path")
def test_a_masked_address_of_data_is_refused():
    assert "DIST_AMP_DATA__PATH" in message_of(64, file_system, MASKED_ADDRESS)
