"""A checkpoint is valid or rejected: damage anywhere is detected, and a hostile checkpoint runs no
code.
"""

import io
import json
import os
import pickle
import random
import shutil

import pytest
import torch
from ranks import on_ranks
from test_checkpoint import settings
from tiny import Tiny, log_row, make_run, take_steps
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

from dist_amp.checkpoint import saver as checkpoint_writing
from dist_amp.checkpoint.format import (
    Manifest,
    all_checkpoints,
    hash_files,
    integrity_error,
    quarantine_after,
    read_manifest,
)
from dist_amp.checkpoint.reader import Reader, read_into
from dist_amp.checkpoint.resume import newest_checkpoint
from dist_amp.checkpoint.saver import Saver, Writer, save
from dist_amp.errors import DataError, Failure
from dist_amp.world import World


def two_checkpoints(folder):
    """A run's folder with the checkpoints of steps 1 and 2."""
    run = make_run(World(), Tiny(), *settings(folder, "single", "fp32"))
    for _ in range(2):
        take_steps(run, 1)
        save(run)
    return all_checkpoints(folder)


def resumed(folder):
    return make_run(World(), Tiny(), *settings(folder, "single", "fp32", "--run.resume", "auto"))


def seal_again(checkpoint, **changes):
    """Make the manifest match the files as they are now, as an attacker would."""
    manifest = read_manifest(checkpoint) if not changes.pop("blank", False) else None
    content = json.loads((checkpoint / "manifest.json").read_text())
    content.pop("xxh3")
    content["files"] = hash_files(
        path for path in checkpoint.iterdir() if path.name != "manifest.json"
    )
    assert manifest is None or manifest.step == content["step"]
    (checkpoint / "manifest.json").write_text(Manifest(**(content | changes)).to_text())


def test_a_checkpoint_lists_all_its_files_with_sizes_and_hashes(tmp_path):
    newest = two_checkpoints(tmp_path)[-1]
    manifest = read_manifest(newest)
    assert manifest.files.keys() == {path.name for path in newest.iterdir()} - {"manifest.json"}
    assert manifest.files == hash_files(newest / name for name in manifest.files)
    assert (manifest.step, manifest.samples, manifest.world_size, manifest.strategy) == (
        2,
        8,
        1,
        "single",
    )
    assert manifest.versions["torch"] == torch.__version__
    assert not integrity_error(newest)
    assert not list(tmp_path.glob("checkpoints/.*")), "nothing half written is left"


@pytest.mark.bad_input("a shard that is truncated, flipped or missing")
@pytest.mark.bad_input("metadata, manifest or a rank's state corrupt or missing")
@pytest.mark.bad_input("a symbolic link in place of a checkpoint's file")
@pytest.mark.parametrize("spoil", ["flip", "cut", "remove", "folder", "link"])
def test_damage_to_any_file_is_refused_and_the_one_before_is_resumed(tmp_path, capsys, spoil):
    numbers = random.Random(0)
    newest = two_checkpoints(tmp_path)[-1]
    for path in sorted(newest.iterdir()):
        content = path.read_bytes()
        for _ in range(5 if spoil in ("flip", "cut") else 1):
            path.unlink()
            if spoil == "flip":
                bit = numbers.randrange(8 * len(content))
                flipped = bytearray(content)
                flipped[bit // 8] ^= 1 << bit % 8
                path.write_bytes(flipped)
            elif spoil == "cut":
                path.write_bytes(content[: numbers.randrange(len(content))])
            elif spoil == "folder":
                path.mkdir()
            elif spoil == "link":
                (tmp_path / "elsewhere").write_bytes(content)
                path.symlink_to(tmp_path / "elsewhere")
            assert (
                path.name == "manifest.json" and spoil == "link"
            ) or path.name in integrity_error(newest), path.name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(content)
    (newest / "__0_0.distcp").unlink()
    assert resumed(tmp_path).step == 1
    assert (
        "__0_0.distcp can't be read (No such file or directory); using step_00000001 instead"
        in capsys.readouterr().err
    )


@pytest.mark.bad_input("checkpoints exist, but none is valid")
def test_checkpoints_of_which_none_is_valid_stop_the_run_with_each_reason(tmp_path):
    older, newer = two_checkpoints(tmp_path)
    (older / "manifest.json").unlink()
    (newer / ".metadata").write_bytes(b"")
    with pytest.raises(
        DataError,
        match=r"none of the checkpoints is valid: .*step_00000002: .metadata has 0 bytes, not "
        r".*step_00000001: manifest.json can't be read .*start a new run in another --run.dir",
    ) as error:
        resumed(tmp_path)
    assert error.value.exit_code == 65


@pytest.mark.bad_input("a newer format version")
def test_a_newer_format_is_refused_with_both_versions(tmp_path):
    newest = two_checkpoints(tmp_path)[-1]
    seal_again(newest, format=2)
    assert (
        integrity_error(newest)
        == "its format is 2, this version reads up to 1; use a newer dist_amp"
    )


@pytest.mark.bad_input("a manifest path that is absolute or has `..`")
@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", "a/b"])
def test_a_manifest_that_lists_what_lies_elsewhere_is_refused(tmp_path, name):
    newest = two_checkpoints(tmp_path)[-1]
    content = json.loads((newest / "manifest.json").read_text())
    content.pop("xxh3")
    content["files"][name] = {"bytes": 1, "xxh3": "0"}
    (newest / "manifest.json").write_text(Manifest(**content).to_text())
    assert (
        integrity_error(newest)
        == f"manifest.json lists {name!r}, which is not the name of a file in this folder"
    )


class Payload:
    """What runs a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.bad_input("a pickle payload in a checkpoint")
def test_a_payload_in_the_metadata_is_refused_and_not_run(tmp_path):
    newest, mark = two_checkpoints(tmp_path / "run")[-1], tmp_path / "was run"
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    for hostile in (Payload(mark), [metadata, Payload(mark)]):
        (newest / ".metadata").write_bytes(pickle.dumps(hostile))
        seal_again(newest)
        with pytest.raises(
            DataError, match="is rejected: .metadata asks for posix.mkdir, .* nothing was run"
        ):
            resumed(tmp_path / "run")
    metadata.planner_data = Payload(mark)
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(newest)
    with pytest.raises(DataError, match="posix.mkdir"):
        resumed(tmp_path / "run")
    assert not mark.exists()


class Enum:
    """An enum's member as some releases of Python pickle it; or what hides behind that form."""

    def __init__(self, owner, name):
        self.what = owner, name

    def __reduce__(self):
        return getattr, self.what


def test_an_enums_member_is_read_in_every_release_of_python_and_no_other_attribute_is(tmp_path):
    newest = two_checkpoints(tmp_path)[-1]
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    properties = metadata.state_dict_metadata["counters"].properties
    plain = {
        slot: getattr(properties, slot)
        for slot in ("dtype", "layout", "requires_grad", "pin_memory")
    }

    def write(member):
        class State:
            def __reduce__(self):
                return TensorProperties, (*tuple(plain.values())[:3], member, plain["pin_memory"])

        metadata.state_dict_metadata["counters"].properties = State()
        (newest / ".metadata").write_bytes(pickle.dumps(metadata))
        seal_again(newest)

    write(Enum(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    assert resumed(tmp_path).step == 2
    for owner, name in (
        (_MEM_FORMAT_ENCODING, "__init__"),
        (Manifest, "to_text"),
        (torch.Size, "numel"),
    ):
        write(Enum(owner, name))
        with pytest.raises(DataError, match="is rejected: .metadata asks for"):
            resumed(tmp_path)


def shard_entry(newest, name):
    """(metadata, where in the shard the entry `name` lies)."""
    metadata = pickle.loads((newest / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == name)
    return metadata, index


@pytest.mark.parametrize(
    "name", ["model.0.0.weight", "optimizer.0.0.weight.exp_avg", "ranks.0.random.torch", "counters"]
)
def test_a_payload_in_place_of_a_tensor_is_refused_and_not_run(tmp_path, name):
    newest, mark = two_checkpoints(tmp_path / "run")[-1], tmp_path / "was run"
    metadata, index = shard_entry(newest, name)
    stream = io.BytesIO()
    torch.save(Payload(mark), stream)
    (newest / "__0_9.distcp").write_bytes(stream.getvalue())
    place = metadata.storage_data[index]
    place.relative_path, place.offset, place.length = "__0_9.distcp", 0, len(stream.getvalue())
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(newest)
    with pytest.raises(DataError, match="can't be loaded|is rejected"):
        resumed(tmp_path / "run")
    assert not mark.exists()


def test_a_payload_in_an_entry_of_bytes_is_refused_and_not_run(tmp_path):
    newest, mark = two_checkpoints(tmp_path / "run")[-1], tmp_path / "was run"
    metadata, index = shard_entry(newest, "counters")
    stream = io.BytesIO()
    torch.save(Payload(mark), stream)
    (newest / "__0_9.distcp").write_bytes(stream.getvalue())
    place = metadata.storage_data[MetadataIndex("counters")] = metadata.storage_data.pop(index)
    place.relative_path, place.offset, place.length = "__0_9.distcp", 0, len(stream.getvalue())
    metadata.state_dict_metadata["counters"] = BytesStorageMetadata()
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(newest)
    with pytest.raises(DataError, match="can't be loaded|is rejected"):
        resumed(tmp_path / "run")
    state = {
        "counters": "not a tensor"
    }  # torch's planner unpickles for such an entry whatever it finds
    with pytest.raises(BaseException, match="(?s)weights_only"):
        read_into(state, Reader(newest))
    assert not mark.exists()


@pytest.mark.bad_input("a `.metadata` that points outside its folder")
def test_metadata_that_points_out_of_the_folder_is_refused(tmp_path):
    newest = two_checkpoints(tmp_path / "run")[-1]
    metadata, index = shard_entry(newest, "counters")
    metadata.storage_data[index].relative_path = "../step_00000001/__0_0.distcp"
    (newest / ".metadata").write_bytes(pickle.dumps(metadata))
    seal_again(newest)
    with pytest.raises(
        DataError,
        match="points to '../step_00000001/__0_0.distcp', which the manifest does not list",
    ):
        resumed(tmp_path / "run")


def test_nothing_but_tensors_is_written(tmp_path):
    newest = two_checkpoints(tmp_path)[-1]
    kinds = {
        type(e).__name__
        for e in pickle.loads((newest / ".metadata").read_bytes()).state_dict_metadata.values()
    }
    assert kinds == {"TensorStorageMetadata"}


def test_the_best_checkpoint_is_kept_with_the_newest(tmp_path):
    run = make_run(World(), Tiny(), *settings(tmp_path, "single", "fp32"))
    for loss in (5.0, 3.0, 4.0, 4.5, 4.2):
        take_steps(run, 1)
        run.metrics.write_evaluation(run.step, {"loss": loss})
        save(run)
    assert [path.name[-1] for path in all_checkpoints(tmp_path)] == ["2", "4", "5"]
    assert resumed(tmp_path).metrics.best == {"step": 2, "loss": 3.0}


def test_rejected_checkpoints_are_quarantined_and_their_steps_saved_again(tmp_path):
    (two_checkpoints(tmp_path)[-1] / "__0_0.distcp").write_bytes(b"damaged")
    (tmp_path / "checkpoints/.step_00000003.writing").mkdir()
    run = resumed(tmp_path)
    assert [path.name for path in quarantine_after(tmp_path, run.step)] == ["refused_step_00000002"]
    take_steps(run, 1)
    save(run)
    assert newest_checkpoint("auto", tmp_path, World()).name == "step_00000002"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "refused_step_00000002", "step_00000001", "step_00000002"]  # fmt: skip


def test_a_step_that_is_saved_already_is_not_written_again(tmp_path):
    run = make_run(World(), Tiny(), *settings(tmp_path, "single", "fp32"))
    take_steps(run, 1)
    before = (save(run) / "manifest.json").stat()
    after = (save(run) / "manifest.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def full_disk_on_rank_1(world, folder, on_failure):
    """Two background saves of which the first finds no space on rank 1: the errors, and the
    checkpoints written.
    """
    run = make_run(
        world, Tiny(), *settings(folder, "fsdp", "fp32", "--checkpoint.on_failure", on_failure)
    )

    class Full(Writer):
        def write_data(self, plan, planner):
            if world.rank == 1 and "00000001" in str(self.path):
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    checkpoint_writing.Writer = Full
    errors = []
    try:
        with Saver(run) as saver:
            for _ in range(2):
                take_steps(run, 1)
                saver.save(wait=False)
                while run.metrics.save is not None:
                    saver.on_log(log_row(run))
    except Failure as error:
        errors.append(str(error))
    finally:
        checkpoint_writing.Writer = Writer
    world.barrier()
    return errors, [path.name for path in folder.glob("checkpoints/*")]


@pytest.mark.bad_input("no space, or quota, while saving")
@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_a_failed_background_save_is_known_to_all_ranks(tmp_path, on_failure):
    for errors, kept in on_ranks(2, full_disk_on_rank_1, tmp_path, on_failure):
        if on_failure == "continue":
            assert (errors, kept) == ([], ["step_00000002"])
        else:
            assert kept == []
            assert (
                "step_00000001 could not be written: rank 1: No space left on device (" in errors[0]
            )


def saves_in_a_row(world, folder):
    """Five saves at once, each while the one before is under way; which were ever written at one
    time.
    """
    run = make_run(world, Tiny(), *settings(folder, "ddp", "fp32", "--checkpoint.keep", 9))
    real, under_way, most = checkpoint_writing.write_tensors, [], []

    def slow(*args, **kwargs):
        import time

        under_way.append(1)
        most.append(len(under_way))
        time.sleep(0.1)
        result = real(*args, **kwargs)
        under_way.pop()
        return result

    checkpoint_writing.write_tensors = slow
    try:
        with Saver(run) as saver:
            for _ in range(5):
                take_steps(run, 1)
                saver.save(wait=False)
    finally:
        checkpoint_writing.write_tensors = real
    return max(most), len(all_checkpoints(folder))


def test_no_two_saves_overlap_and_the_last_one_is_waited_for(tmp_path):
    assert on_ranks(2, saves_in_a_row, tmp_path) == [(1, 5)] * 2


def what_is_saved_while_training_goes_on(world, folder):
    runs = [
        make_run(
            world, Tiny(), *settings(folder / name, "fsdp", "fp16", "--checkpoint.async_save", name)
        )
        for name in ("true", "false")
    ]
    for run in runs:
        with Saver(run) as saver:
            take_steps(run, 3)
            saver.save(wait=False)
            take_steps(run, 4)
    in_background, at_once = (all_checkpoints(folder / name)[0] for name in ("true", "false"))
    return content_of(in_background), content_of(at_once)


def content_of(checkpoint):
    """Every tensor in it, whole, but for measured times."""
    reader = Reader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name != "interval"
    }
    read_into(tensors, reader)
    return tensors


def test_a_background_save_holds_the_state_of_its_step_whatever_training_does_meanwhile(tmp_path):
    for one, other in on_ranks(2, what_is_saved_while_training_goes_on, tmp_path):
        assert one.keys() == other.keys()
        assert [
            name
            for name in one
            if not torch.equal(one[name].nan_to_num(), other[name].nan_to_num())
        ] == []
