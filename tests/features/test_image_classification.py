"""Images: what of a dataset becomes a sample, the shipped classifier and its augmentation."""

import io
import json
import sys

import datasets
import pytest
import torch
from conftest import ROOT
from messages import message_of
from PIL import Image
from tiny import make_run, take_steps

from dist_amp.data import Batches
from dist_amp.loading.plan import Plan
from dist_amp.settings import DataConfig
from dist_amp.sources.labelled_images import LabelledImage
from dist_amp.sources.load import Converted, load_split
from dist_amp.step import evaluate
from dist_amp.tasks.image_classification import ImageClassification
from dist_amp.world import World

pytestmark = pytest.mark.usefixtures("own_cache")


def picture(colour=128, size=(8, 8), mode="L"):
    return Image.new(mode, size, colour)


def encoded(image, **options):
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def parquet(folder, labels, names=()):
    """A Parquet file with grey images by number; names: of the classes that the labels number."""
    images = [picture(100 * number) for number in range(3)] * (len(labels) // 3)
    table = datasets.Dataset.from_dict({"image": images, "label": labels})
    table = table.cast_column("image", datasets.Image())
    if names:
        table = table.cast_column("label", datasets.ClassLabel(names=names))
    table.to_parquet(folder / "x.parquet")
    return DataConfig(path=f"{folder}/x.parquet", validation_split=0.2)


def folder_with_table(folder, text, name="labels.csv", images=("a.png", "b.png", "sub/c.png")):
    for number, image in enumerate(images):
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(folder / image)
    (folder / name).write_text(text)
    return DataConfig(path=str(folder), validation_split=0.34)


def test_a_short_training_names_held_out_digits():
    """100 steps are 2 epochs; of ten classes, chance is 0.1."""
    pytest.importorskip("sklearn")
    digits = ImageClassification(DataConfig())
    train, held_out = (digits.build_dataset(split) for split in ("train", "validation"))
    assert (len(train), len(held_out)) == (1618, 179)
    image = train[0]["image"]
    assert (image.shape, image.dtype, image.min(), image.max()) == ((1, 8, 8), torch.float32, 0, 1)
    words = "--use_amp false --train.micro_batch_size 32 --optim.lr 3e-3 --train.steps 100"
    run = make_run(World(), digits, *words.split(), "--eval.every", 50)
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


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(("size", "channels"), [((4, 4), 1), ((30, 21), 3)])
def test_the_model_takes_any_size_in_either_layout(size, channels, channels_last):
    task = ImageClassification(DataConfig(), size, channels, 7, channels_last=channels_last)
    model, seen = task.build_model(), []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out))
    batch = {"image": torch.rand(3, channels, *size), "label": torch.tensor([0, 3, 6])}
    assert task.logits(model, batch).shape == (3, 7)
    if size != (4, 4):
        assert seen[0].is_contiguous(memory_format=torch.channels_last) == channels_last
    assert {p.is_contiguous() for p in model.parameters()} == {True}


def augmented(image, **options):
    options = {"classes": 2, "shift_pixels": 0, "rotation_degrees": 0, **options}
    task = ImageClassification(DataConfig(), size=tuple(image.shape[1:]), **options)
    rng = torch.Generator()
    return [task.augment({"image": image}, rng.manual_seed(seed))["image"] for seed in range(20)]


def test_each_augmentation_can_be_switched_off():
    image = torch.rand(1, 8, 12, generator=torch.Generator().manual_seed(0))
    # Sampling at a pixel's own place rounds the place: 1e-6 of the side, times a difference of 1.
    close = {"rtol": 0, "atol": 1e-5}
    for one in augmented(image):
        torch.testing.assert_close(one, image, **close)
    flipped = [torch.allclose(one, image.flip(2), **close) for one in augmented(image, flip=True)]
    assert 0 < sum(flipped) < len(flipped)
    for options in ({"shift_pixels": 1.0}, {"rotation_degrees": 10.0}):
        assert not any(torch.allclose(one, image, **close) for one in augmented(image, **options))


@pytest.mark.parametrize(
    ("labels", "names"),
    [([0, 1, 2], ["cat", "dog", "owl"]), (["cat", "dog", "owl"], ()), ([False, True, True], ())],
)
def test_names_texts_and_truth_values_are_labels_and_need_no_classes(labels, names, tmp_path):
    task = ImageClassification(parquet(tmp_path, labels * 10, names))
    dataset = task.build_dataset("train")
    assert task.class_count == len(set(labels))
    assert (len(dataset), len(task.build_dataset("validation"))) == (24, 6)
    found = {(round(float(one["image"].mean()) * 2.55), int(one["label"])) for one in dataset}
    assert found == {(number, min(number, len(set(labels)) - 1)) for number in range(3)}


def samples_of(rows, size=(8, 8), channels=1, classes=2, number_of=()):
    return Converted(rows, LabelledImage(("image", "label"), size, channels, classes, number_of))


@pytest.mark.bad_input("images of other sizes or channels, palettes, an alpha channel")
@pytest.mark.parametrize("channels", [1, 3])
def test_images_of_other_channels_and_sizes_are_converted(channels):
    colours = {"L": 51, "RGB": (51, 51, 51), "RGBA": (51, 51, 51, 9), "LA": (51, 9)}
    images = [picture(colour, mode=mode) for mode, colour in colours.items()]
    images += [picture(51, size=(40, 9)), picture(51).convert("P"), picture(51).convert("CMYK")]
    rows = [{"image": image, "label": 0} for image in images]
    for sample in samples_of(rows, (6, 10), channels).__getitems__(list(range(len(rows)))):
        torch.testing.assert_close(sample["image"], torch.full((channels, 6, 10), 0.2))


def test_encoded_images_are_decoded_upright():
    """As a Parquet view gives them: bytes; a camera's orientation is applied."""
    wide = Image.new("L", (8, 4))
    wide.putpixel((0, 0), 255)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    row = {"image": {"bytes": encoded(wide, exif=exif), "path": "x.png"}, "label": True}
    sample = samples_of([row], (8, 4))[0]
    assert (sample["image"].shape, sample["image"].argmax()) == ((1, 8, 4), 3)


@pytest.mark.parametrize("name", ["labels.csv", "metadata.csv"])
def test_a_table_beside_images_has_their_labels(name, tmp_path):
    labels = ("dog", "dog", "tabby cat")
    text = "\ufefffile_name,label\nsub/c.png,{2}\n\n./a.png,{0}\nb.png,{1}\n".format(*labels)
    data = folder_with_table(tmp_path, text, name)
    names = ImageClassification(data).names
    assert list(names) == sorted(set(labels))
    rows = [row for split in ("train", "validation") for row in load_split(data, split, "image")]
    found = {row["image"].getpixel((0, 0)): names[row["label"]] for row in rows}
    assert found == dict(enumerate(labels))


def test_tables_in_the_folders_of_splits_have_each_their_own_labels(tmp_path):
    images = ("train/a.png", "train/b.png", "test/c.png")
    folder_with_table(tmp_path, "file,label\na.png,0\nb.png,12\n", "train/labels.csv", images)
    (tmp_path / "test/labels.csv").write_text("file,label\nc.png,1\n")
    task = ImageClassification(DataConfig(path=str(tmp_path)), classes=13)
    for split, labels in (("train", [0, 12]), ("validation", [1])):  # plain numbers
        assert [int(sample["label"]) for sample in task.build_dataset(split)] == labels


GOOD = {"image": encoded(picture()), "label": 0}


@pytest.mark.bad_input("a label that is no class, or an image that is damaged or of 16 bits")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"label": 10}, "label 10 is not one of the 10 classes, 0"),
        ({"label": "owl"}, "label 'owl' is not one"),
        ({"image": {"bytes": encoded(picture())[:40], "path": "a/b.png"}}, "a/b.png can't be deco"),
        ({"image": picture(mode="I;16")}, "the image has pixels of mode I;16, whose range is not"),
    ],
)
def test_a_row_that_is_no_labelled_image_is_named_with_the_reason(row, message):
    rows = samples_of([GOOD, {**GOOD, **row}], classes=10, number_of={"cat": 0})
    plan = Plan(2, 2, 2, 1, 0, 0, order="dataset")
    text = message_of(65, lambda: next(Batches(rows, object(), plan, 0, World())))
    assert text.startswith("rank 0: sample 1 of the training split could not be read: ")
    assert message in text


@pytest.mark.bad_input("the digits without scikit-learn")
def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    text = message_of(64, ImageClassification(DataConfig()).build_model)
    assert "is missing; pip install scikit-learn, or set data.name or data.path" in text


@pytest.mark.bad_input("an image column that does not exist, or labels without classes")
@pytest.mark.bad_input("a table of labels that does not fit the images, or is no table")
@pytest.mark.parametrize(
    ("make", "content", "options", "message"),
    [
        (parquet, [0, 1, 1], {"image_column": "photo"}, "args.image_column=photo does not exist;"),
        (parquet, [3, 7, 7], {}, "classes=auto, but the column label names 0 classes; set task."),
        (parquet, ["x"] * 3, {}, "the column label names 1 classes; set task.args.classes to"),
        (folder_with_table, "file,label\nz.png,x\n", {}, "labels.csv: z.png must be an exist"),
        (folder_with_table, "file,label\na.png,x\n./a.png,y\n", {}, "labels.csv: ./a.png must be"),
        (folder_with_table, "file,label\na.png,x\nb.png,\n", {}, "labels.csv: b.png must be an"),
        (folder_with_table, "file,label\na.png,x\n", {}, "b.png has no row in "),
        (folder_with_table, "file;label\na.png;x\n", {}, "has the columns file;label; it needs"),
    ],
)
def test_columns_and_tables_without_a_label_for_each_image_are_refused_by_name(
    make, content, options, message, tmp_path
):
    task = ImageClassification(make(tmp_path, content), **options)
    assert message in message_of(65, lambda: (task.build_model(), task.build_dataset("train")))
