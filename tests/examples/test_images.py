"""Image readers of the examples: class folders, caption tables, and the digits in disjoint parts."""

import json

import numpy as np
import pytest
from PIL import Image

from examples._images import digits, draw_grid, judge, read_captions, read_classes, read_image, read_parts


def save(path, colour, size=(6, 4)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_digits_are_in_three_disjoint_parts():
    parts = digits()
    assert [len(part) for part in parts] == [1257, 180, 360]
    for part in parts:
        images, labels = zip(*part, strict=True)
        assert np.stack(images).shape == (len(part), 1, 8, 8)
        assert images[0].dtype == np.float32
        assert 0 <= np.min(images) < np.max(images) <= 1
        assert np.bincount(labels).min() >= 0.09 * len(part)
    assert len({image.tobytes() for part in parts for image, _ in part}) == 1797
    assert [label for _, label in digits()[2]] == [label for _, label in parts[2]]


def test_subfolder_is_a_class(tmp_path):
    for i in range(5):
        save(tmp_path / "red" / f"{i}.png", (255, 0, 0))
        save(tmp_path / "blue" / "deeper" / f"{i}.jpg", (0, 0, 255))
    (tmp_path / "red" / "notes.txt").write_text("not an image")
    examples, names = read_classes(tmp_path, size=8, n_channels=3)
    assert names == ["blue", "red"]
    assert [label for _, label in examples] == [0] * 5 + [1] * 5
    assert examples[-1][0].shape == (3, 8, 8)
    np.testing.assert_allclose(examples[-1][0][:, 0, 0], [1, 0, 0])
    assert read_image(tmp_path / "red" / "0.png", 8, 1).shape == (1, 8, 8)


def test_captions_are_read_from_a_table_next_to_the_images(tmp_path):
    """All captions of an image are in the same part."""
    rows = [{"file_name": f"{i}.png", "text": f"a green of {i}{again}"} for i in range(20) for again in ("", " again")]
    for i in range(20):
        save(tmp_path / f"{i}.png", (0, 10 * i, 0))
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = read_captions(tmp_path, size=4)
    assert [len(part) for part in parts] == [28, 4, 8]
    of_parts = [{image.tobytes() for image, _ in part} for part in parts]
    assert [len(found) for found in of_parts] == [14, 2, 4] and len(set.union(*of_parts)) == 20
    for image, text in parts[0]:
        green = 10 * int(text.split()[3]) / 255
        np.testing.assert_allclose(image, np.array([0, green, 0], np.float32)[:, None, None] * np.ones((3, 4, 4)))


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"`.*`: expected two or more subfolders with images, one per class, got 0\."):
        read_classes(tmp_path, size=8)
    with pytest.raises(ValueError, match=r"`.*missing`: expected two or more subfolders"):
        read_classes(tmp_path / "missing", size=8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=r"`.*empty`: expected at least 5 images, for training, validation and testing, got 0"
    ):
        read_classes(tmp_path, size=8)
    (tmp_path / "empty" / "0.png").write_text("no image")
    with pytest.raises(ValueError, match=r"`.*0\.png`: expected an image, got a file that Pillow cannot read\."):
        read_image(tmp_path / "empty" / "0.png", 8, 1)
    with pytest.raises(ValueError, match=r"`.*metadata\.jsonl`: expected a line of .* for each image, got 0 images and no"):
        read_captions(tmp_path, size=8)
    with pytest.raises(ValueError, match=r"`.*metadata\.jsonl`: expected a line of .* got no folder"):
        read_captions(tmp_path / "missing", size=8)
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "b.png", "text": "b"}) + "\n")
    with pytest.raises(ValueError, match=r"`.*metadata\.jsonl` row 1: expected the file 'b\.png' next to it, got none\."):
        read_captions(tmp_path, size=8)


def test_judge_accepts_real_digits_and_detects_copies():
    train, _, test = digits()
    images, labels = zip(*test, strict=True)
    classes, real = judge(np.stack(images), train, test)
    assert np.mean(classes == labels) == real["test_judge_accuracy"] > 0.97
    assert real["test_distance"] == real["test_real_distance"] > 0.5
    assert judge(np.stack([image for image, _ in train]), train, test)[1]["test_distance"] == 0


def test_grid_is_drawn_as_one_picture(tmp_path):
    draw_grid(tmp_path / "grid.png", [np.zeros((1, 8, 8), np.float32)] * 3, ["a", "b", "c"], n_columns=2)
    with Image.open(tmp_path / "grid.png") as image:
        assert image.size == (300, 340)


def test_folders_of_images(tmp_path):
    with pytest.raises(ValueError, match=r"data`: expected two or more subfolders with images, one per class, got 0\."):
        read_parts(tmp_path / "data", 8)
    for name in ("cat", "dog"):
        (tmp_path / "data" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"data/cat`: expected at least 5 images, .*, got 0\."):
        read_parts(tmp_path / "data", 8)
    for i in range(20):
        Image.fromarray(np.full((9, 7), 12 * i, np.uint8)).save(tmp_path / "data" / ("cat", "dog")[i % 2] / f"{i}.png")
    (train, validation, test), names = read_parts(tmp_path / "data", 8)
    assert names == ["cat", "dog"]
    assert len(train) + len(validation) + len(test) == 20
    assert train[0][0].shape == (1, 8, 8)
