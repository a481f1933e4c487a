"""A checkpoint is valid or rejected: damage is detected, and a hostile one runs no code."""

import json
import os
import pickle
import random
import shutil
from unittest.mock import patch

import pytest
import torch
from test_checkpoint import settings
from tiny import Tiny, make_run, save, seal_again, take_steps
from torch.distributed.checkpoint import metadata as dcp_metadata

from dist_amp.checkpoint import format
from dist_amp.checkpoint.format import all_checkpoints, integrity_error, quarantine_after
from dist_amp.errors import ConfigError, DataError
from dist_amp.world import World


def new_run(folder, *more):
    return make_run(World(), Tiny(), *settings(folder, "single", "fp32", *more))


def resumed(folder):
    return new_run(folder, "--run.resume", "auto")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    run = new_run(folder)
    for _ in range(2):
        take_steps(run, 1)
        save(run)
    return folder


@pytest.fixture
def newest(original, tmp_path):
    """The newer checkpoint of a copy of a run's folder with those of steps 1 and 2."""
    shutil.copytree(original, tmp_path / "run")
    return all_checkpoints(tmp_path / "run")[-1]


def write_metadata(checkpoint, metadata):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(checkpoint)


def metadata_of(checkpoint):
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def rejection(checkpoint):
    with pytest.raises(DataError, match="can't be loaded|is rejected|does not fit") as error:
        resumed(checkpoint.parent.parent)
    return str(error.value)


def test_a_checkpoint_lists_all_its_files_with_sizes_and_hashes_and_holds_only_tensors(newest):
    manifest = format.read_manifest(newest)
    assert manifest.files.keys() == {path.name for path in newest.iterdir()} - {"manifest.json"}
    assert manifest.files == format.hash_files(newest / name for name in manifest.files)
    assert (manifest.step, manifest.samples, manifest.world_size) == (2, 8, 1)
    assert (manifest.strategy, manifest.versions["torch"]) == ("single", torch.__version__)
    assert not integrity_error(newest)
    assert not list(newest.parent.glob(".*")), "nothing half written is left"
    kinds = {type(e).__name__ for e in metadata_of(newest).state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}


@pytest.mark.bad_input("a checkpoint's file that is truncated, flipped or missing")
@pytest.mark.parametrize("spoil", ["flip", "cut", "remove", "folder"])
def test_damage_to_any_file_is_named(newest, spoil):
    numbers = random.Random(0)
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for _ in range(5):
            at = numbers.randrange(len(content))
            path.unlink()
            if spoil == "flip":
                flipped = bytes([content[at] ^ 1 << numbers.randrange(8)])
                path.write_bytes(content[:at] + flipped + content[at + 1 :])
            elif spoil == "cut":
                path.write_bytes(content[:at])
            elif spoil == "folder":
                path.mkdir()
            assert path.name in integrity_error(newest)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(content)


def test_each_rank_verifies_what_the_rank_of_its_number_wrote_and_together_they_verify_all(newest):
    shard = (newest / "__0_0.distcp").read_bytes()
    for writer in range(12):
        (newest / f"__{writer}_0.distcp").write_bytes(shard)
    seal_again(newest)
    for path in newest.glob("[!m]*"):  # all but the manifest
        content = path.read_bytes()
        path.write_bytes(b"damaged")
        writer = int(path.stem[2:-2]) if path.suffix == ".distcp" else 0
        for ranks in (12, 5, 1):
            named = [path.name in integrity_error(newest, rank, ranks) for rank in range(ranks)]
            assert [rank for rank in range(ranks) if named[rank]] == [writer % ranks]
        path.write_bytes(content)


@pytest.mark.bad_input("checkpoints exist, but none is valid")
def test_the_one_before_a_damaged_one_is_resumed_and_without_any_the_run_ends(newest, capsys):
    folder = newest.parent.parent
    (newest / "__0_0.distcp").unlink()
    assert resumed(folder).step == 1
    said = "__0_0.distcp can't be read (No such file or directory); using step_00000001 instead"
    assert said in capsys.readouterr().err
    (newest.with_name("step_00000001") / "manifest.json").unlink()
    said = r"none of the checkpoints is valid: .*step_00000002: __0_0.distcp can't .*step_00000001:"
    said += r" manifest.json can't be read .*start a new run in another --run.dir"
    with pytest.raises(DataError, match=said) as error:
        resumed(folder)
    assert error.value.exit_code == 65


@pytest.mark.bad_input("a manifest of a newer format, with a wrong value, or a path elsewhere")
@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ({"format": 2}, "its format is 2, this version reads up to 1; use a newer dist_amp"),
        ({"step": 1.5}, "manifest.json is damaged"),
        ({"samples": ...}, "manifest.json is damaged"),
        ({"files": {"a": 3}}, "manifest.json is damaged"),
        ({"files": {"..": {"bytes": 1, "xxh3": "0"}}}, "lists '..', which is not the name of a f"),
        ({"files": {"/etc/a": {"bytes": 1, "xxh3": "0"}}}, "lists '/etc/a', which is not the name"),
    ],
)
def test_a_manifest_that_this_version_did_not_write_is_refused(newest, forged, said):
    content = json.loads((newest / "manifest.json").read_text()) | forged
    content = {name: value for name, value in content.items() if value is not ...}
    del content["xxh3"]
    (newest / "manifest.json").write_text(format.hashed_text(content))
    assert said in integrity_error(newest)


@pytest.mark.bad_input("a checkpoint's config that is damaged, or nested without end")
@pytest.mark.parametrize("text", ["\udcff", "a" + ".b" * 2_000 + " = 1"], ids=["text", "nested"])
def test_a_checkpoint_whose_config_is_none_is_refused(newest, text):
    (newest / "config.toml").write_text(text, errors="surrogateescape")
    seal_again(newest)
    with pytest.raises(DataError, match="config.toml: .*, or restore the file from a backup"):
        resumed(newest.parent.parent)


class Calls:
    """Is pickled as a call: (function, arguments, attributes to set on what it returns)."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def replaced(**changes):
    """What changes the metadata of the loss scale's interval."""
    return lambda metadata: vars(metadata.state_dict_metadata["interval"]).update(changes)


def with_memory_format(owner, name):
    """What gives an enum's member by getattr, as some releases of Python pickle it."""
    state = torch.float64, torch.strided, False, Calls(getattr, (owner, name)), False
    return replaced(properties=Calls(dcp_metadata.TensorProperties, (), state))


def pointing_elsewhere(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../step_00000001/__0_0.distcp"


ELSEWHERE = "points to '../step_00000001/__0_0.distcp', which the manifest does not list"
FORGED = [
    (lambda metadata: metadata.state_dict_metadata.pop("interval"), "interval of [], not a row"),
    (lambda metadata: metadata.storage_data.popitem(), "without its content"),
    (pointing_elsewhere, ELSEWHERE),
    (replaced(size=torch.Size([7])), ".metadata has interval of [7], not a row per rank"),
    (replaced(size=torch.Size([2**40, 7])), "interval of [1099511627776, 7] without its content"),
    (replaced(size=torch.Size([-1, 7])), "interval of [-1, 7] without its content"),
    (with_memory_format(torch.Size, "numel"), "is rejected: .metadata can't be read"),
]


@pytest.mark.bad_input("a `.metadata` that torch does not write, or that points elsewhere")
@pytest.mark.parametrize(("change", "said"), FORGED)
def test_metadata_that_torch_would_not_write_is_refused(newest, change, said):
    metadata = metadata_of(newest)
    change(metadata)
    write_metadata(newest, metadata)
    assert said in rejection(newest)


def test_an_enums_member_is_read_as_every_release_of_python_pickles_it(newest):
    metadata = metadata_of(newest)
    with_memory_format(dcp_metadata._MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")(metadata)
    write_metadata(newest, metadata)
    assert resumed(newest.parent.parent).step == 2


@pytest.mark.bad_input("a pickle that changes a class of torch's")
@pytest.mark.parametrize("name", ["Metadata", "_MEM_FORMAT_ENCODING"])
def test_no_pickle_changes_a_class(newest, name):
    """BUILD with a pair sets the attributes of whatever is on the stack."""
    module = b"torch.distributed.checkpoint.metadata"
    forged = b"\x80\x02c" + module + b"\n" + name.encode() + b"\nN}U\x06forgedK\x01s\x86b."
    (newest / ".metadata").write_bytes(forged)
    seal_again(newest)
    assert "is rejected: .metadata is not that of a checkpoint" in rejection(newest)
    assert not hasattr(getattr(dcp_metadata, name), "forged")


@pytest.mark.bad_input("a pickle payload in a checkpoint")
@pytest.mark.parametrize("where", ["metadata", "entry", "entry as bytes"])
def test_a_payload_is_refused_and_not_run(newest, tmp_path, where):
    mark, metadata = tmp_path / "was run", metadata_of(newest)
    payload = Calls(os.mkdir, (str(mark),))
    if where == "metadata":
        metadata.planner_data = payload
    else:
        torch.save(payload, newest / "__0_9.distcp")
        index = next(index for index in metadata.storage_data if index.fqn == "counters")
        place = metadata.storage_data.pop(index)
        place.relative_path, place.offset = "__0_9.distcp", 0
        place.length = (newest / "__0_9.distcp").stat().st_size
        if where == "entry as bytes":
            index = dcp_metadata.MetadataIndex("counters")
            metadata.state_dict_metadata["counters"] = dcp_metadata.BytesStorageMetadata()
        metadata.storage_data[index] = place
    write_metadata(newest, metadata)
    said = rejection(newest)
    assert ("is rejected: .metadata asks for posix.mkdir, " in said) == (where == "metadata")
    if where == "entry as bytes":  # torch's planner unpickles for such an entry whatever it finds
        with pytest.raises(BaseException, match="(?s)weights_only"):
            format.read_into({"counters": "not a tensor"}, format.Reader(newest))
    assert not mark.exists()


def saved_evaluations(folder, best_metric, *evaluations):
    """The last digits of the checkpoints that are left after a save of each evaluation."""
    run = new_run(folder)
    run.task.metrics = run.task.best_metric = best_metric
    for values in evaluations:
        take_steps(run, 1)
        run.metrics.write_evaluation(values.get("after", run.step), values)
        save(run)
    return "".join(path.name[-1] for path in all_checkpoints(folder))


ACCURACY = [(5.0, 0.2), (4.0, 0.8), (1.0, 0.4), (3.0, 0.1), (2.0, 0.5)]
EVALUATIONS = [{"loss": loss, "accuracy": accuracy} for loss, accuracy in ACCURACY]


@pytest.mark.parametrize(
    ("best_metric", "evaluations", "kept"),
    [
        ("loss", [{"loss": 3.0}] * 4, "134"),
        ("max:accuracy", EVALUATIONS, "245"),
        ("accuracy", EVALUATIONS, "45"),
        ("min:loss", EVALUATIONS, "345"),
        # An evaluation counts for the checkpoint of its own step.
        ("loss", [EVALUATIONS[0], {"loss": 1.0, "after": 1}, *[{"loss": 4.0}] * 3], "345"),
    ],
)
def test_the_newest_are_kept_and_the_one_with_the_best_evaluation(
    tmp_path, best_metric, evaluations, kept
):
    assert saved_evaluations(tmp_path, best_metric, *evaluations) == kept


def test_what_is_half_written_is_no_checkpoint_and_what_can_not_be_removed_is_warned_of(
    tmp_path, capsys
):
    saved_evaluations(tmp_path, "loss", *[{"loss": loss} for loss in (4.0, 3.0, 5.0)])
    (tmp_path / "checkpoints" / ".step_00000006.writing").mkdir()
    assert new_run(tmp_path, "--run.resume", "never").step == 0
    run = resumed(tmp_path)
    assert run.metrics.best == {"step": 2, "loss": 3.0}

    def keeps(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied")

    with patch("shutil.rmtree", keeps):
        for _ in range(2):
            take_steps(run, 1)
            save(run)
    assert "step_00000003 can't be removed (Permission denied)" in capsys.readouterr().err


@pytest.mark.bad_input("a task's `best_metric` that no evaluation has")
def test_a_best_metric_that_no_evaluation_has_is_refused_once_that_is_known(tmp_path):
    said = "best_metric='min:f1' is not in the evaluation after step 1, whose checkpoint is saved: "
    with pytest.raises(ConfigError, match=f"{said}name one of loss, accuracy"):
        saved_evaluations(tmp_path, "min:f1", *EVALUATIONS)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step_00000001"]


def test_rejected_checkpoints_are_quarantined_and_their_steps_saved_again_once(newest):
    folder = newest.parent.parent
    (newest / "__0_0.distcp").write_bytes(b"damaged")
    (newest.parent / ".step_00000003.writing").mkdir()
    run = resumed(folder)
    assert [path.name for path in quarantine_after(folder, run.step)] == ["refused_step_00000002"]
    take_steps(run, 1)
    stats = [(save(run) / "manifest.json").stat() for _ in range(2)]
    assert len({(stat.st_ino, stat.st_mtime_ns) for stat in stats}) == 1, "not written again"
    assert resumed(folder).step == 2
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["refused_step_00000002", "step_00000001", "step_00000002"]
    again = new_run(folder, "--run.resume", os.path.relpath(newest))
    assert (save(again) / "manifest.json").stat().st_ino == stats[0].st_ino, "it was resumed"


def test_a_checkpoints_files_are_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(format, "sync_folder", lambda folder: done.append(("flush", folder.name)))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: [done.append(("name", b.name)), rename(a, b)])
    folder = save(make_run(World(), Tiny(), "--run.dir", tmp_path))
    at = done.index(("name", folder.name))
    assert done[at - 1] == ("flush", f".{folder.name}.writing"), "its list of files"
    assert done[at + 1] == ("flush", folder.parent.name), "its name"
