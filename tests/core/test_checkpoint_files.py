"""A checkpoint is valid or rejected: damage is detected, and a hostile one runs no code."""

import io
import json
import os
import pickle
import random
import re
import shutil
import time
from contextlib import closing, redirect_stderr
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from test_checkpoint import settings
from tiny import Tiny, log_row, make_run, save, take_steps
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

from dist_amp.checkpoint import saver as checkpoint_writing
from dist_amp.checkpoint.format import (
    Manifest,
    Reader,
    all_checkpoints,
    hash_files,
    integrity_error,
    quarantine_after,
    read_into,
    read_manifest,
    signed_text,
)
from dist_amp.checkpoint.resume import newest_checkpoint
from dist_amp.errors import ConfigError, DataError
from dist_amp.world import World


def new_run(folder, *more):
    return make_run(World(), Tiny(), *settings(folder, "single", "fp32", *more))


def resumed(folder):
    return new_run(folder, "--run.resume", "auto")


def save_steps(folder, steps):
    run = new_run(folder)
    for _ in range(steps):
        take_steps(run, 1)
        save(run)
    return all_checkpoints(folder)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    save_steps(folder, 2)
    return folder


@pytest.fixture
def newest(original, tmp_path):
    """The newer checkpoint of a copy of a run's folder with those of steps 1 and 2."""
    shutil.copytree(original, tmp_path / "run")
    return all_checkpoints(tmp_path / "run")[-1]


def seal_again(checkpoint, **changes):
    """Make the manifest match the files as they are now, as an attacker would."""
    content = json.loads((checkpoint / "manifest.json").read_text())
    content.pop("xxh3")
    paths = [path for path in checkpoint.iterdir() if path.name != "manifest.json"]
    content["files"] = hash_files(paths)
    (checkpoint / "manifest.json").write_text(Manifest(**(content | changes)).to_text())


def write_metadata(checkpoint, metadata):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(checkpoint)


def metadata_of(checkpoint):
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def rejection(checkpoint):
    """What is said when the checkpoint's run is resumed."""
    with pytest.raises(DataError, match="can't be loaded|is rejected") as error:
        resumed(checkpoint.parent.parent)
    return str(error.value)


def test_a_checkpoint_lists_all_its_files_with_sizes_and_hashes_and_holds_only_tensors(newest):
    manifest = read_manifest(newest)
    assert manifest.files.keys() == {path.name for path in newest.iterdir()} - {"manifest.json"}
    assert manifest.files == hash_files(newest / name for name in manifest.files)
    assert (manifest.step, manifest.samples, manifest.world_size) == (2, 8, 1)
    assert (manifest.strategy, manifest.versions["torch"]) == ("single", torch.__version__)
    assert not integrity_error(newest)
    assert not list(newest.parent.glob(".*")), "nothing half written is left"
    kinds = {type(e).__name__ for e in metadata_of(newest).state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}


@pytest.mark.bad_input("a shard that is truncated, flipped or missing")
@pytest.mark.bad_input("metadata, manifest or a rank's state corrupt or missing")
@pytest.mark.bad_input("a symbolic link in place of a checkpoint's file")
@pytest.mark.parametrize("spoil", ["flip", "cut", "remove", "folder", "link"])
def test_damage_to_any_file_is_named(tmp_path, newest, spoil):
    numbers = random.Random(0)
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for _ in range(5 if spoil in ("flip", "cut") else 1):
            path.unlink()
            if spoil == "flip":
                flipped = bytearray(content)
                flipped[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
                path.write_bytes(flipped)
            elif spoil == "cut":
                path.write_bytes(content[: numbers.randrange(len(content))])
            elif spoil == "folder":
                path.mkdir()
            elif spoil == "link":
                (tmp_path / "elsewhere").write_bytes(content)
                path.symlink_to(tmp_path / "elsewhere")
            is_harmless = path.name == "manifest.json" and spoil == "link"
            assert is_harmless or path.name in integrity_error(newest), path.name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(content)


def test_each_rank_verifies_what_the_rank_of_its_number_wrote_and_together_they_verify_all(newest):
    shard = (newest / "__0_0.distcp").read_bytes()
    for writer in range(12):
        (newest / f"__{writer}_0.distcp").write_bytes(shard)
    seal_again(newest)
    for path in set(newest.iterdir()) - {newest / "manifest.json"}:
        path.write_bytes(b"damaged")
        writer = int(path.stem[2:-2]) if path.suffix == ".distcp" else 0
        for ranks in (12, 5, 1):
            named = [
                rank for rank in range(ranks) if path.name in integrity_error(newest, rank, ranks)
            ]
            assert named == [writer % ranks]
        path.write_bytes(shard)
        seal_again(newest)


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


@pytest.mark.bad_input("a newer format version")
@pytest.mark.bad_input("a manifest with a value of another type, or without one")
@pytest.mark.bad_input("a manifest path that is absolute or has `..`")
@pytest.mark.parametrize(
    ("forged", "said"),
    [
        ({"format": 2}, "its format is 2, this version reads up to 1; use a newer dist_amp"),
        ({"format": "1"}, "manifest.json is damaged"),
        ({"step": 10**30}, "manifest.json is damaged"),
        ({"samples": ...}, "manifest.json is damaged"),
        ({"evaluation": {"loss": "low"}}, "manifest.json is damaged"),
        ({"files": {"a": 3}}, "manifest.json is damaged"),
        ({"files": {"..": {"bytes": 1, "xxh3": "0"}}}, "lists '..', which is not the name of a f"),
        ({"files": {"/etc/a": {"bytes": 1, "xxh3": "0"}}}, "lists '/etc/a', which is not the name"),
        ({"files": {"a/b": {"bytes": 1, "xxh3": "0"}}}, "lists 'a/b', which is not the name of a "),
    ],
)
def test_a_manifest_that_this_version_did_not_write_is_refused(newest, forged, said):
    content = json.loads((newest / "manifest.json").read_text()) | forged
    content = {name: value for name, value in content.items() if value is not ...}
    del content["xxh3"]
    (newest / "manifest.json").write_text(signed_text(content))
    assert said in integrity_error(newest)


@pytest.mark.bad_input("a checkpoint's config that is damaged, or nested without end")
@pytest.mark.parametrize("text", ["\udcff", "a" + ".b" * 2_000 + " = 1"], ids=["text", "nested"])
def test_a_checkpoint_whose_config_is_none_is_refused(newest, text):
    (newest / "config.toml").write_text(text, errors="surrogateescape")
    seal_again(newest)
    with pytest.raises(DataError, match="config.toml can't be read: .*; restore it from a backup"):
        resumed(newest.parent.parent)


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def sized(*size):
    """Another size of the entry `interval`."""
    return lambda entries: vars(entries["interval"]).update(size=torch.Size(size))


# What is changed in the entries of .metadata.
FORGED = {
    "no interval": lambda entries: entries.pop("interval"),
    "counters of bytes": lambda entries: entries.update(counters=BytesStorageMetadata()),
    "an interval without rows": sized(7),
    "a size beyond the file's": sized(2**40, 7),
    "a negative size": sized(-1, 7),
    "chunks of another type": lambda entries: vars(entries["counters"]).update(chunks=["x"]),
    "another field": lambda entries: vars(entries["counters"]).update(extra=1),
}


@pytest.mark.bad_input("a `.metadata` whose entries are missing, or not what torch writes")
@pytest.mark.bad_input("a `.metadata` that points outside its folder")
@pytest.mark.parametrize("name", [*FORGED, "another place", "no place"])
def test_metadata_that_torch_would_not_write_is_refused(newest, name):
    metadata = metadata_of(newest)
    said = "is rejected: .metadata|can't be loaded: "
    if name in FORGED:
        FORGED[name](metadata.state_dict_metadata)
    elif name == "no place":
        del metadata.storage_data[next(iter(metadata.storage_data))]
    else:
        next(iter(metadata.storage_data.values())).relative_path = "../step_00000001/__0_0.distcp"
        said = "points to '../step_00000001/__0_0.distcp', which the manifest does not list"
    write_metadata(newest, metadata)
    assert re.search(said, rejection(newest))


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


class Calls:
    """Is pickled as a call, as some releases of Python pickle an enum's member; or what hides."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


def test_an_enums_member_is_read_in_every_release_of_python_and_no_other_attribute_is(newest):
    metadata = metadata_of(newest)
    counters = metadata.state_dict_metadata["counters"]
    real = counters.properties

    def write(owner, name):
        member = Calls((getattr, (owner, name)))
        state = real.dtype, real.layout, real.requires_grad, member, real.pin_memory
        counters.properties = Calls((TensorProperties, (), state))
        write_metadata(newest, metadata)

    write(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    assert resumed(newest.parent.parent).step == 2
    others = (_MEM_FORMAT_ENCODING, "__init__"), (Manifest, "to_text"), (torch.Size, "numel")
    for owner, name in others:
        write(owner, name)
        assert "is rejected: .metadata " in rejection(newest)


@pytest.mark.bad_input("a pickle payload in a checkpoint")
@pytest.mark.parametrize("where", ["metadata", "plan", "entry", "entry as bytes"])
def test_a_payload_is_refused_and_not_run(newest, tmp_path, where):
    mark, metadata = tmp_path / "was run", metadata_of(newest)
    if where == "metadata":
        metadata = [metadata, Payload(mark)]
    elif where == "plan":
        metadata.planner_data = Payload(mark)
    else:
        stream = io.BytesIO()
        torch.save(Payload(mark), stream)
        (newest / "__0_9.distcp").write_bytes(stream.getvalue())
        index = next(index for index in metadata.storage_data if index.fqn == "counters")
        place = metadata.storage_data.pop(index)
        place.relative_path, place.offset, place.length = "__0_9.distcp", 0, len(stream.getvalue())
        if where == "entry as bytes":
            index = MetadataIndex("counters")
            metadata.state_dict_metadata["counters"] = BytesStorageMetadata()
        metadata.storage_data[index] = place
    write_metadata(newest, metadata)
    said = rejection(newest)
    assert ("is rejected: .metadata asks for posix.mkdir, " in said) == ("entry" not in where)
    if where == "entry as bytes":  # torch's planner unpickles for such an entry whatever it finds
        with pytest.raises(BaseException, match="(?s)weights_only"):
            read_into({"counters": "not a tensor"}, Reader(newest))
    assert not mark.exists()


def saved_evaluations(folder, best_metric, *evaluations):
    """The last digits of the checkpoints that are left after a save of each evaluation."""
    run = new_run(folder)
    run.task.metrics = run.task.best_metric = best_metric
    for values in evaluations:
        take_steps(run, 1)
        run.metrics.write_evaluation(run.step, values)
        save(run)
    return "".join(path.name[-1] for path in all_checkpoints(folder))


ACCURACY = [(5.0, 0.2), (4.0, 0.8), (1.0, 0.4), (3.0, 0.1), (2.0, 0.5)]
EVALUATIONS = [{"loss": loss, "accuracy": accuracy} for loss, accuracy in ACCURACY]


@pytest.mark.parametrize(
    ("best_metric", "evaluations", "kept"),
    [
        ("loss", [{"loss": loss} for loss in (5.0, 3.0, 4.0, 4.5, 4.2)], "245"),
        ("loss", [{"loss": 3.0}] * 4, "134"),
        ("max:accuracy", EVALUATIONS, "245"),
        ("accuracy", EVALUATIONS, "45"),
        ("min:loss", EVALUATIONS, "345"),
    ],
)
def test_the_newest_are_kept_and_the_one_with_the_best_evaluation(
    tmp_path, best_metric, evaluations, kept
):
    assert saved_evaluations(tmp_path, best_metric, *evaluations) == kept


def test_an_evaluation_counts_for_the_checkpoint_of_its_own_step_alone(tmp_path):
    run = new_run(tmp_path)
    for evaluated_step, loss in ((1, 5.0), (1, 1.0), (3, 4.0), (4, 4.0), (5, 4.0)):
        take_steps(run, 1)
        run.metrics.write_evaluation(evaluated_step, {"loss": loss})
        save(run)
    assert [path.name[-1] for path in all_checkpoints(tmp_path)] == ["3", "4", "5"]


def test_what_is_half_written_is_no_checkpoint_and_what_can_not_be_removed_is_warned_of(
    tmp_path, capsys
):
    saved_evaluations(tmp_path, "loss", *[{"loss": loss} for loss in (4.0, 3.0, 5.0)])
    (tmp_path / "checkpoints" / ".step_00000006.writing").mkdir()
    assert newest_checkpoint("never", tmp_path, World()) is None
    run = resumed(tmp_path)
    assert run.metrics.best == {"step": 2, "loss": 3.0}
    for _ in range(2):
        take_steps(run, 1)

        def keeps(path, ignore_errors=False):
            if not ignore_errors:
                raise PermissionError(13, "Permission denied")

        with patch("shutil.rmtree", keeps):
            save(run)
    assert "step_00000003 can't be removed (Permission denied)" in capsys.readouterr().err


@pytest.mark.bad_input("a task's `best_metric` that no evaluation has")
@pytest.mark.parametrize("name", ["accurracy", "min:f1"])
def test_a_best_metric_that_an_evaluation_lacks_is_refused_once_its_step_is_saved(tmp_path, name):
    said = f"best_metric={name!r} is not in the evaluation after step 1, whose checkpoint is saved"
    with pytest.raises(ConfigError, match=said) as error:
        saved_evaluations(tmp_path, name, *EVALUATIONS)
    assert "name one of loss, accuracy" in str(error.value)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step_00000001"]


@pytest.mark.parametrize("name", ["accuracy", None])
def test_a_best_metric_that_no_evaluation_can_have_is_refused_at_the_start(name):
    task = Tiny()
    task.best_metric = name
    with pytest.raises(ConfigError, match=f"best_metric={name!r} is in no evaluation: name one of"):
        make_run(World(), task)


def test_rejected_checkpoints_are_quarantined_and_their_steps_saved_again_once(newest):
    folder = newest.parent.parent
    (newest / "__0_0.distcp").write_bytes(b"damaged")
    (newest.parent / ".step_00000003.writing").mkdir()
    run = resumed(folder)
    assert [path.name for path in quarantine_after(folder, run.step)] == ["refused_step_00000002"]
    take_steps(run, 1)
    stats = [(save(run) / "manifest.json").stat() for _ in range(2)]
    assert len({(stat.st_ino, stat.st_mtime_ns) for stat in stats}) == 1, "not written again"
    assert newest_checkpoint("auto", folder, World()).name == "step_00000002"
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["refused_step_00000002", "step_00000001", "step_00000002"]
    again = new_run(folder, "--run.resume", os.path.relpath(newest))
    assert (save(again) / "manifest.json").stat().st_ino == stats[0].st_ino, "it was resumed"


def test_a_save_renames_checkpoints_of_another_run_that_it_meets(newest, capsys):
    run = new_run(newest.parent.parent)
    take_steps(run, 1)
    save(run)
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["refused_step_00000001", "refused_step_00000002", "step_00000001"]
    assert "is damaged, or of another run: it keeps this name" in capsys.readouterr().err


def full_disk_on_rank_1(world, folder):
    """The warnings and checkpoints of two saves; the first finds no space on rank 1."""
    run = make_run(world, Tiny(), *settings(folder, "fsdp", "fp32"))

    class Full(FileSystemWriter):
        def write_data(self, plan, planner):
            if world.rank == 1 and "00000001" in str(self.path):
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    full = patch.object(checkpoint_writing, "FileSystemWriter", Full)
    with full, closing(run.saver) as saver, redirect_stderr(io.StringIO()) as said:
        for _ in range(2):
            take_steps(run, 1)
            saver.save(wait=False)
            while run.saver.pending is not None:
                saver.on_log(log_row(run))
    world.barrier()
    return said.getvalue(), [path.name for path in folder.glob("checkpoints/*")]


@pytest.mark.bad_input("no space, or quota, while saving")
def test_a_failed_background_save_is_known_to_all_ranks_and_the_run_continues(tmp_path):
    (said, kept), (_, kept_by_1) = on_ranks(2, full_disk_on_rank_1, tmp_path)
    assert kept == kept_by_1 == ["step_00000002"]
    assert "step_00000001 could not be written: rank 1: No space left on device; the " in said


def saves_in_a_row(world, folder):
    """Five saves, each while the one before is under way; the most that were at one time."""
    run = make_run(world, Tiny(), *settings(folder, "ddp", "fp32", "--checkpoint.keep", 9))
    real, under_way, most = checkpoint_writing.write_tensors, [], []

    def slow(*args, **kwargs):
        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.1)
        result = real(*args, **kwargs)
        under_way.pop()
        return result

    with patch.object(checkpoint_writing, "write_tensors", slow), closing(run.saver) as saver:
        for _ in range(5):
            take_steps(run, 1)
            saver.save(wait=False)
    return max(most), len(all_checkpoints(folder))


def test_no_two_saves_overlap_and_the_last_one_is_waited_for(tmp_path):
    assert on_ranks(2, saves_in_a_row, tmp_path) == [(1, 5)] * 2


def saved_while_training_goes_on(world, folder):
    """Every tensor of a save in the background, and of one that training waited for."""
    contents = []
    for background in ("true", "false"):
        words = settings(folder / background, "fsdp", "fp16", "--checkpoint.async_save", background)
        run = make_run(world, Tiny(), *words)
        with closing(run.saver) as saver:
            take_steps(run, 3)
            saver.save(wait=False)
            take_steps(run, 4)
        if world.rank:
            continue  # one rank may read a checkpoint alone
        reader = Reader(all_checkpoints(run.folder)[0])
        entries = reader.read_metadata().state_dict_metadata.items()
        content = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in entries}
        read_into(content, reader)
        contents.append(content)
    return contents


def test_a_background_save_holds_the_state_of_its_step_whatever_training_does_meanwhile(tmp_path):
    one, other = on_ranks(2, saved_while_training_goes_on, tmp_path)[0]
    assert one.keys() == other.keys()
    same = {name: torch.equal(one[name].nan_to_num(), other[name].nan_to_num()) for name in one}
    assert all(same.values()), same


def test_a_checkpoints_files_are_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    from dist_amp.checkpoint import format as files

    done = []
    monkeypatch.setattr(files, "sync_folder", lambda folder: done.append(("flush", folder.name)))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: [done.append(("name", b.name)), rename(a, b)])
    folder = save(make_run(World(), Tiny(), "--run.dir", tmp_path))
    at = done.index(("name", folder.name))
    assert done[at - 1] == ("flush", f".{folder.name}.writing"), "its list of files"
    assert done[at + 1] == ("flush", folder.parent.name), "its name"


def test_a_full_disk_is_named_as_the_cause_of_a_save_that_torch_cut_short():
    from dist_amp.checkpoint.format import reason

    with pytest.raises(RuntimeError) as full:
        torch.save(torch.ones(10**6), "/dev/full")
    assert reason(full.value) == "no space is left on the disk"
    assert reason(RuntimeError("in a collective:\n  the cause\n")) == "the cause"
