"""Images: what of a dataset becomes a sample, augmentation as a pure function, the shipped
classifier, bad inputs.
"""

import io
import json
import sys
from collections import Counter

import pytest
import torch
from conftest import ROOT
from PIL import Image
from ranks import on_ranks
from tiny import make_run, take_steps

from dist_amp.config.load import load_config
from dist_amp.data import Batches
from dist_amp.errors import ConfigError, DataError
from dist_amp.loading.plan import Plan
from dist_amp.settings import DataConfig
from dist_amp.sources.labelled_images import LabelledImages
from dist_amp.step import evaluate
from dist_amp.tasks.image_classification import ImageClassification
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell
from dist_amp.verify.findings import inspect_task
from dist_amp.verify.reference import Reference
from dist_amp.world import World

CPU = torch.device("cpu")
QUICK = (
    "--use_amp false --train.micro_batch_size 32 --data.drop_last true --optim.lr 3e-3"
).split()
FP32 = 1e-5  # relative: two orders of adding up some hundred float32 values in each of a few layers


@pytest.fixture
def digits():
    pytest.importorskip("sklearn")
    return ImageClassification(DataConfig())


def picture(colour=128, size=(8, 8), mode="L"):
    return Image.new(mode, size, colour)


def encoded(image, **options):
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def parquet(path, images, labels, label=None, **columns):
    """Write a Parquet file with images, as `datasets` does; `label`: that column's feature."""
    import datasets

    features = {"image": datasets.Image()} | ({"label": label} if label else {})
    table = datasets.Dataset.from_dict({"image": images, "label": labels, **columns})
    for name, feature in features.items():
        table = table.cast_column(name, feature)
    table.to_parquet(path)
    return DataConfig(path=str(path), validation_split=0.2)


# ---- the digits


def test_the_digits_are_1797_scans_of_which_a_tenth_is_held_out(digits):
    train, held_out = (digits.build_dataset(split) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (1618, 179)
    samples = [part[index] for part in (train, held_out) for index in range(len(part))]
    labels = Counter(int(sample["label"]) for sample in samples)
    assert sorted(labels) == list(range(10))
    assert min(labels.values()) > 170
    sample = train[0]["image"]
    assert (sample.shape, sample.dtype, sample.min(), sample.max()) == (
        (1, 8, 8),
        torch.float32,
        0,
        1,
    )


def test_a_short_training_names_held_out_digits(digits):
    """100 steps are 2 epochs; of ten classes, chance is 0.1."""
    run = make_run(World(), digits, *QUICK, "--train.steps", 100, "--eval.every", 50)
    take_steps(run, 100)
    assert evaluate(run)["accuracy"] > 0.9


@pytest.mark.slow
def test_the_config_names_97_of_100_held_out_digits(launch, tmp_path, say):
    pytest.importorskip("sklearn")
    done = launch(0, "--config", ROOT / "configs/images.toml", "--run.dir", "run")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run/summary.json").read_text())
    say(f"held-out accuracy {found['evaluation']['accuracy']}")
    assert found["evaluation"]["accuracy"] > 0.97


# ---- the model


@pytest.mark.parametrize(
    ("size", "channels"), [((4, 4), 1), ((5, 9), 3), ((28, 28), 1), ((30, 21), 3)]
)
def test_the_linear_layer_fits_any_size(size, channels):
    task = ImageClassification(DataConfig(), size=size, channels=channels, classes=7)
    batch = {"image": torch.rand(3, channels, *size), "label": torch.tensor([0, 3, 6])}
    assert task.logits(task.build_model(), batch).shape == (3, 7)
    assert task.flops_per_item(None) > 0


def test_inputs_are_channels_last_and_weights_stay_contiguous():
    seen = {}
    for wanted in (True, False):
        task = ImageClassification(
            DataConfig(), size=(16, 16), channels=3, classes=2, channels_last=wanted
        )
        torch.manual_seed(0)
        model = task.build_model()
        model[1].register_forward_hook(lambda module, args, out: seen.update(out=out))
        batch = {
            "image": torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
            "label": torch.ones(4).long(),
        }
        seen[wanted] = task.loss_sum(model, batch)
        seen[wanted].backward()
        assert seen["out"].is_contiguous(memory_format=torch.channels_last) == wanted
        assert all(p.is_contiguous() for p in model.parameters())
    assert torch.isclose(seen[True], seen[False], rtol=FP32)


def compared(world, cells):
    """Why each of the cells does not compute the reference's steps; "" if it does."""
    task = ImageClassification(DataConfig(), width=4)
    reference = Reference(load_config([], environ={}), CPU, task)
    [note] = inspect_task(reference)
    assert not note.fails
    return note.text, [check_cell(world, reference, Cell(*cell)).cause for cell in cells]


def test_two_ranks_compute_the_step_of_one_process_but_for_batch_statistics(digits):
    """With augmentation, which the reference sees as well."""
    for ranks, strategies in ((1, ["single"]), (2, ["ddp", "fsdp"])):
        note, causes = on_ranks(ranks, compared, [(name, "fp32") for name in strategies])[0]
        assert "(BatchNorm2d): the result depends on the whole batch (batch statistics)" in note
        assert causes == [""] * len(strategies)


# ---- augmentation


def stream(task, ranks, steps, start=0, workers=0, split="training"):
    """[step] -> {sample's index: image}, of all ranks; 48 samples to a step."""
    dataset, size = task.build_dataset("train"), 48 // ranks
    of_ranks = []
    for rank in range(ranks):
        plan = Plan(len(dataset), 48, size, ranks, rank, seed=3, order="randperm")
        batches = Batches(dataset, task, plan, workers, CPU, split=split)
        batches.position = start
        found = []
        for _ in range(steps):
            next(batches)
            found.append(
                {
                    index: image
                    for batch, indices in batches.last_step
                    for index, image in zip(indices, batch["image"], strict=True)
                }
            )
        batches.close()
        of_ranks.append(found)
    return [
        {index: image for part in parts for index, image in part.items()}
        for parts in zip(*of_ranks, strict=True)
    ]


def same(a, b):
    return all(
        x.keys() == y.keys() and all(torch.equal(x[i], y[i]) for i in x)
        for x, y in zip(a, b, strict=True)
    )


def test_augmented_samples_are_the_same_on_any_number_of_ranks_and_workers(digits):
    expected = stream(digits, ranks=1, steps=4)
    for ranks, workers in [(4, 0), (2, 2)]:
        assert same(stream(digits, ranks, 4, workers=workers), expected)
    torch.manual_seed(1)  # of no effect: `rng` is the only source
    assert same(stream(digits, ranks=1, steps=4), expected)


def test_augmented_samples_are_the_same_after_a_resume_on_other_ranks(digits):
    through = stream(digits, ranks=2, steps=40)  # over the end of an epoch, which has 34 steps
    assert same(stream(digits, ranks=4, steps=3, start=1618 + 48 * 2, workers=2), through[36:39])


def test_augmented_samples_differ_in_the_next_epoch_and_from_the_datasets(digits):
    epochs = [
        {index: image for step in stream(digits, 1, 34, start) for index, image in step.items()}
        for start in (0, 1618)
    ]
    plain = digits.build_dataset("train")
    for index in range(0, 1618, 100):
        images = [epochs[0][index], epochs[1][index], plain[index]["image"]]
        assert not any(torch.equal(images[n], images[n - 1]) for n in range(3))


def test_held_out_samples_are_not_augmented(digits):
    plain = digits.build_dataset("train")
    (step,) = stream(digits, ranks=1, steps=1, split="validation")
    assert all(torch.equal(image, plain[index]["image"]) for index, image in step.items())


def augmented(task, image, times=20):
    rng = torch.Generator()
    return [task.augment({"image": image}, rng.manual_seed(seed))["image"] for seed in range(times)]


def test_each_augmentation_can_be_switched_off():
    image = torch.rand(1, 8, 12, generator=torch.Generator().manual_seed(0))
    off = {"size": (8, 12), "classes": 2, "shift_pixels": 0, "rotation_degrees": 0}
    # Sampling at a pixel's own place rounds the place: 1e-6 of the side, times differences of at
    # most 1.
    close = {"rtol": 0, "atol": 1e-5}
    for one in augmented(ImageClassification(DataConfig(), **off), image):
        torch.testing.assert_close(one, image, **close)
    flipped = [
        torch.allclose(one, image.flip(2), **close)
        for one in augmented(ImageClassification(DataConfig(), **off, flip=True), image)
    ]
    assert 0 < sum(flipped) < len(flipped)


def test_a_rotation_keeps_shapes_where_height_and_width_differ():
    """A round blob in the middle stays as it is; stretched, it would differ by 0.5."""
    y, x = torch.meshgrid(torch.arange(24) - 11.5, torch.arange(48) - 23.5, indexing="ij")
    blob = torch.exp(-(x**2 + y**2) / (2 * 4**2))[None]
    task = ImageClassification(
        DataConfig(), size=(24, 48), classes=2, shift_pixels=0, rotation_degrees=90
    )
    for one in augmented(task, blob):
        torch.testing.assert_close(
            one, blob, rtol=0, atol=0.02
        )  # bilinear: h^2 / 8 x the second derivative, 1 / 16


# ---- other datasets


def test_a_parquet_dataset_with_named_classes_needs_no_classes(tmp_path):
    import datasets

    labels, feature = [0, 1, 2] * 10, datasets.ClassLabel(names=["cat", "dog", "owl"])
    data = parquet(tmp_path / "x.parquet", [picture(100 * n) for n in labels], labels, feature)
    task = ImageClassification(data)
    dataset = task.build_dataset("train")
    assert (task.classes, len(dataset), len(task.build_dataset("validation"))) == (3, 24, 6)
    for sample in dataset.__getitems__(list(range(24))):
        torch.testing.assert_close(
            sample["image"], torch.full((1, 8, 8), int(sample["label"]) * 100 / 255)
        )


@pytest.mark.bad_input("images of other sizes or channels, palettes, an alpha channel")
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_other_channels_and_sizes_are_converted(channels):
    colours = {"L": 51, "RGB": (51, 51, 51), "RGBA": (51, 51, 51, 9), "LA": (51, 9)}
    images = [picture(colour, mode=mode) for mode, colour in colours.items()]
    images += [picture(51, size=(40, 9)), picture(51).convert("P"), picture(51).convert("CMYK")]
    rows = [{"image": image, "label": 0} for image in images]
    for sample in LabelledImages(
        rows, ("image", "label"), (6, 10), channels, classes=2
    ).__getitems__(list(range(len(rows)))):
        torch.testing.assert_close(sample["image"], torch.full((channels, 6, 10), 0.2))


def test_encoded_images_are_decoded_upright():
    """As a Parquet view gives them: bytes; a camera's orientation is applied."""
    wide = Image.new("L", (8, 4))
    wide.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    (sample,) = LabelledImages(
        [{"i": {"bytes": encoded(wide, exif=exif), "path": "x.png"}, "l": True}],
        ("i", "l"),
        (8, 4),
        1,
        2,
    ).__getitems__([0])
    assert sample["image"].shape == (1, 8, 4)
    assert sample["image"].argmax() == 3
    assert sample["label"] == 1


def test_texts_and_truth_values_are_labels_too(tmp_path):
    labels = ["dog", "cat", "owl"] * 10
    task = ImageClassification(parquet(tmp_path / "x.parquet", [picture()] * 30, labels))
    dataset = task.build_dataset("train")
    assert (task.names, task.classes) == (["cat", "dog", "owl"], 3)
    assert sorted({int(sample["label"]) for sample in map(dataset.__getitem__, range(24))}) == [
        0,
        1,
        2,
    ]
    truths = ImageClassification(
        parquet(tmp_path / "y.parquet", [picture()] * 20, [True, False] * 10)
    )
    assert truths.classes == 2
    assert truths.build_dataset("train")[0]["label"].dtype == torch.int64


def test_a_folder_per_class_is_a_dataset(tmp_path):
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for each in range(10):
            picture((90 * number, 0, each), size=(30, 20), mode="RGB").save(
                tmp_path / "pets" / name / f"{each}.png"
            )
    task = ImageClassification(
        DataConfig(path=str(tmp_path / "pets"), validation_split=0.2), size=(20, 30), channels=3
    )
    dataset = task.build_dataset("train")
    assert (list(task.names), len(dataset), len(task.build_dataset("validation"))) == (
        ["cat", "dog"],
        16,
        4,
    )
    for index in range(16):
        assert dataset[index]["image"][0, 0, 0] * 255 == 90 * dataset[index]["label"]


def test_a_views_own_order_and_fingerprint_are_the_samples():
    class View(list):
        fingerprint = "abc"

        def shuffled(self, global_batch_size, world_size):
            return "own", None

    samples = LabelledImages(
        View([{"image": picture(), "label": 0}]), ("image", "label"), (8, 8), 1, 2
    )
    assert (samples.fingerprint, samples.shuffled(8, 1)) == ("abc", ("own", None))
    assert not hasattr(LabelledImages([], ("image", "label"), (8, 8), 1, 2), "shuffled")


# ---- bad inputs


def reading(rows, **options):
    """What a run says of these rows."""
    dataset = LabelledImages(rows, ("image", "label"), (8, 8), 1, **{"classes": 10, **options})
    plan = Plan(len(rows), len(rows), len(rows), 1, 0, seed=0, order="dataset")
    with pytest.raises(DataError) as error:
        next(Batches(dataset, object(), plan, 0, CPU))
    return str(error.value)


@pytest.mark.bad_input("a label that is no class: out of range, a text of no class, a float, none")
@pytest.mark.parametrize("label", [10, -1, 2.0, None, "owl"])
def test_a_label_outside_the_classes_names_the_sample_and_the_range(label):
    rows = [{"image": picture(), "label": 0}, {"image": picture(), "label": label}]
    text = reading(rows, names=["cat"])
    assert text.startswith("rank 0: sample 1 of the training split could not be read: ValueError: ")
    assert f"label {label!r} is none of the 10 classes, 0 to 9" in text


@pytest.mark.bad_input("an image that can't be decoded, is missing, or is no picture")
@pytest.mark.parametrize("value", [encoded(picture())[:40], b"GIF", None, [[1, 2], [3, 4]]])
def test_an_image_that_cannot_be_decoded_names_the_sample(value):
    text = reading(
        [{"image": encoded(picture()), "label": 0}, {"image": {"bytes": value}, "label": 0}]
    )
    assert text.startswith("rank 0: sample 1 of the training split could not be read: ")
    assert text.endswith("; fix or remove it")


@pytest.mark.bad_input("an image of 16-bit or float pixels")
@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_an_image_without_a_known_range_is_refused(mode):
    text = reading([{"image": Image.new(mode, (8, 8)), "label": 0}])
    assert (
        f"the image has pixels of mode {mode}, whose range is not known; convert it to 8 bits"
        in text
    )


@pytest.mark.bad_input("an image or label column that does not exist")
@pytest.mark.parametrize("wrong", ["image_column", "label_column"])
def test_an_absent_image_or_label_column_names_those_there(wrong, tmp_path):
    data = parquet(tmp_path / "x.parquet", [picture()] * 10, [0, 1] * 5)
    with pytest.raises(DataError) as error:
        ImageClassification(data, classes=2, **{wrong: "picture"}).build_dataset("train")
    assert (
        str(error.value)
        == f"task.args.{wrong}=picture does not exist; the columns are image, label"
    )


@pytest.mark.bad_input(
    "`task.args.size` below 4, which two poolings leave nothing of; `task.args.classes` below 2"
)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--task.args.size", "8", "3"],
            "task.args.size=8 3 on the command line must be at least 4",
        ),
        (
            ["--task.args.classes", "1"],
            "task.args.classes=1 on the command line must be at least 2",
        ),
    ],
)
def test_a_size_or_number_of_classes_that_is_too_small_names_the_least(words, text):
    with pytest.raises(ConfigError) as error:
        load_config(["--config", str(ROOT / "configs/images.toml"), *words], environ={})
    assert text in str(error.value)


@pytest.mark.bad_input(
    "`task.args.classes=auto` with labels that do not name their classes, or only one"
)
@pytest.mark.parametrize("labels", [[3, 7] * 5, [2.5, 1.5] * 5, ["cat"] * 10])
def test_labels_that_name_no_classes_ask_for_their_number(labels, tmp_path):
    task = ImageClassification(parquet(tmp_path / "x.parquet", [picture()] * 10, labels))
    with pytest.raises(
        DataError, match="task.args.classes=auto, and the column label names [01] classes; set task"
    ):
        task.build_model()


@pytest.mark.bad_input("the digits without scikit-learn")
def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError) as error:
        ImageClassification(DataConfig()).build_model()
    assert (
        "is missing; pip install -e '.[images]' in the clone's folder, or set data.name or "
        "data.path" in str(error.value)
    )
