"""Images and texts: their files, invalid input, and what trackers receive."""

import io
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import redeqx
from redeqx.monitor import Console


class Album:
    """A tracker that accepts images and texts."""

    def __init__(self):
        self.seen = []

    def log(self, metrics, step):
        self.seen.append(step)

    def log_image(self, name, image, step):
        self.seen.append((name, image.shape, image.dtype, step))

    def log_text(self, name, text, step):
        self.seen.append((name, text, step))


def pixels(file) -> np.ndarray:
    """The pixels of a PNG file, `[height, width]` or `[height, width, channels]`."""
    with Image.open(file) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def recorded(tmp_path, image) -> np.ndarray:
    """The pixels of the file that is recorded for an image."""
    Console(tmp_path, verbose=False).records.image("x", image, 1)
    return pixels(tmp_path / "media" / "step_00000001_x.png")


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
def test_the_file_keeps_every_pixel(tmp_path, shape):
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.testing.assert_array_equal(recorded(tmp_path, image).reshape(shape), image)
    flipped = image[::2, ::-1]
    np.testing.assert_array_equal(recorded(tmp_path, flipped).reshape(flipped.shape), flipped)


def test_floats_from_0_to_1_are_converted(tmp_path):
    image = jnp.array([[0.0, 0.5, 1.0], [1 / 255, 1.001, -0.001]], jnp.float32)
    np.testing.assert_array_equal(recorded(tmp_path, image), [[0, 128, 255], [1, 255, 0]])
    assert (recorded(tmp_path, jnp.full((2, 2, 3), 0.25, jnp.bfloat16)) == 64).all()


@pytest.mark.parametrize("is_main", [True, False])
def test_a_missing_pillow_is_named_with_its_extra(tmp_path, monkeypatch, is_main):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"`image`: expected pillow.*redeqx\[images\]"):
        Console(tmp_path, is_main=is_main).records.image("x", np.zeros((2, 2)), 1)


@pytest.mark.parametrize(
    "image, error, message",
    [
        (
            np.zeros((2, 3, 8, 8)),
            ValueError,
            "`image`: expected the shape [height, width], or [height, width, channels] with 1, 3 or 4 channels, got "
            "[2, 3, 8, 8]. Move the channels last, and join several images to one, as by `np.concatenate(images, axis=1)`.",
        ),
        (np.zeros((3, 8, 8)), ValueError, "got [3, 8, 8]. Move the channels last"),
        (np.zeros((0, 8)), ValueError, "got [0, 8]. Move"),
        (np.full((2, 2), 3.5), ValueError, "`image`: expected numbers from 0 to 1, or uint8, got 3.5 to 3.5. Rescale it,"),
        (np.array([[0, 200]]), ValueError, "`image`: expected numbers from 0 to 1, or uint8, got 0 to 200. Rescale it, or"),
        (np.array([[np.nan, 0.5]]), ValueError, "`image`: expected numbers from 0 to 1, or uint8, got nan to nan. Rescale"),
        ("cat.png", TypeError, "`image`: expected an array or a matplotlib figure, got str. Convert it first."),
    ],
)
@pytest.mark.parametrize("is_main", [True, False])
def test_invalid_images_are_refused_in_every_process(image, error, message, is_main, tmp_path):
    console = Console(tmp_path, is_main=is_main)
    with pytest.raises(error) as raised:
        console.records.image("x", image, 1)
    assert message in str(raised.value)
    assert not (tmp_path / "media").exists()


def test_file_names_are_derived_from_names(tmp_path):
    console = Console(tmp_path)
    console.records.text("eval/of the 3rd: ü", "é", 12)
    assert [path.name for path in (tmp_path / "media").iterdir()] == ["step_00000012_eval_of_the_3rd__ü.txt"]
    assert next((tmp_path / "media").iterdir()).read_text("utf-8") == "é"
    with pytest.raises(
        ValueError, match=r"`name`: expected letters or digits, which name a file, got '\.\./'\. Pass a name"
    ):
        console.records.text("../", "x", 1)
    with pytest.raises(ValueError, match=r"`name`: expected at most 200 bytes, which name a file, got 202: 'üüü.*'\.\.\."):
        console.records.text(101 * "ü", "x", 1)


def test_matplotlib_figure(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    Console(tmp_path).records.image("curve", figure, 3)
    assert pixels(tmp_path / "media" / "step_00000003_curve.png").shape[:2] == (50, 100)


def test_rewind_deletes_only_media_of_later_steps(tmp_path):
    console = Console(tmp_path)
    for step in (1, 2, 3):
        console.records.metrics({"loss": 1.0}, step)
        console.records.text("words", "x", None)
    (tmp_path / "media" / "step_notes.txt").write_text("mine")
    console.records.close()
    console.records.rewind(2)
    console.records.text("now", "x", None)  # at the resumed step
    found = sorted(path.name for path in (tmp_path / "media").iterdir())
    assert found == ["step_00000001_words.txt", "step_00000002_now.txt", "step_00000002_words.txt", "step_notes.txt"]


def test_tensorboard_receives_images_and_texts(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    console = Console(tmp_path, loggers=["tensorboard"], verbose=False)
    image = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    console.records.begin({"mesh": "data=8 | model=1", "prompt": "two\nlines"}, lambda: "the plan")
    console.records.image("samples", image, 5)
    console.records.text("words", "<b>\n*x*", 6)
    console.records.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, found = file.read_bytes(), {}
    while data:
        n = struct.unpack("<Q", data[:8])[0]
        event = Event.FromString(data[12 : 12 + n])
        data = data[16 + n :]
        found.update({value.tag: (event.step, value) for value in event.summary.value})
    step, value = found["samples"]
    assert step == 5 and (value.image.height, value.image.width) == (4, 6)
    np.testing.assert_array_equal(pixels(io.BytesIO(value.image.encoded_image_string)), image)
    texts = {tag: value.tensor.string_val[0].decode() for tag, (_, value) in found.items() if tag != "samples"}
    assert texts == {
        "config/text_summary": "|name|value|\n|-|-|\n|mesh|data=8 \\| model=1|\n|prompt|two<br>lines|\n",
        "plan/text_summary": "    the plan",
        "words/text_summary": "    <b>\n    *x*",
    }


class Samples(redeqx.Callback):
    every = 2

    def on_step(self, trainer, metrics):
        trainer.deployer.log_image("samples", jax.nn.sigmoid(trainer.model.weight))
        trainer.deployer.log_text("words", f"at {trainer.step}")


def test_callback_records_at_its_step(tmp_path):
    import equinox as eqx

    album = Album()
    deployer = redeqx.Deployer(workdir=tmp_path, loggers=[album], verbose=False)
    trainer = redeqx.Trainer(
        deployer,
        model=eqx.nn.Linear(4, 8, key=jax.random.key(0)),
        optimizer=optax.sgd(1e-2),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(),
    )
    trainer.fit(np.ones((32, 4), np.float32), batch_size=8, callbacks=[Samples()])
    of_2, of_4 = ([("samples", (8, 4), np.uint8, step), ("words", f"at {step}", step)] for step in (2, 4))
    assert album.seen == [1, 2, *of_2, 3, 4, *of_4]
    files = [f"step_0000000{step}_{name}" for step in (2, 4) for name in ("samples.png", "words.txt")]
    assert sorted(path.name for path in (tmp_path / "media").iterdir()) == files
