"""The image captioner at a small size: it learns, pictures match their captions, and wrong input is refused."""

import json

import equinox as eqx
import jax
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models

import redeqx
from examples._images import digits, read_norm
from examples._texts import EOS, learn_tokenizer
from examples.image_to_text.main import Args, collate_fn, draw, load, loss_fn, main, read_data, score
from examples.image_to_text.pictures import CELL, NAMES, compose, two_digits
from redeqx.models import save_pretrained
from redeqx.models.gpt2 import GPT2Config
from redeqx.models.vision_encoder_decoder import VisionEncoderDecoder, VisionEncoderDecoderConfig
from redeqx.models.vit import ViTConfig
from tests.examples._run import run_example

TINY = [
    "--n-train", 512, "--n-held-out", 32, "--d-model", 32, "--n-heads", 2, "--n-encoder-layers", 1, "--n-ids", 320,
    "--n-epochs", 4, "--dropout", 0, "--n-beams", 2, "--learning-rate", 0.01,
]  # fmt: skip


def write_images(folder, n, size=12):
    """A folder of `n` distinct images with captions."""
    rng = np.random.default_rng(0)
    names = [f"{i}.png" for i in range(n)]
    for name in names:
        Image.fromarray(rng.integers(256, size=(size, size, 3), dtype=np.uint8)).save(folder / name)
    return write_table(folder, [{"file_name": name, "text": f"picture {i}"} for i, name in enumerate(names)])


def write_table(folder, rows):
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def assert_refused(args, *parts):
    """Asserts that `main` raises an error with all `parts` before any training."""
    with pytest.raises(ValueError) as caught:
        main(args)
    for part in parts:
        assert str(part) in str(caught.value)
    assert not (args.workdir / "ckpts").exists()


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_learns_and_saves_a_reusable_model(tmp_path):
    run = run_example("image_to_text", *TINY, workdir=tmp_path / "run")
    losses = run.series("loss")
    assert len(losses) == 4 * 512 // 64 and np.mean(losses[-4:]) < 0.5 * losses[0]
    assert run.series("eval_rougeL")[-1] > 0.3  # the words that all captions share are learnt
    assert set(run.metrics[-1]) >= {"step", "test_exact", "test_rougeL"}
    assert 0 <= run.metrics[-1]["test_exact"] <= run.metrics[-1]["test_rougeL"] <= 1
    assert (tmp_path / "run/captions.png").stat().st_size > 1000
    best = json.loads((tmp_path / "run/ckpts/index.json").read_text())["argmax_exact"]
    assert (tmp_path / "run/ckpts" / best).is_dir()

    # Load the saved folder and caption images from files: its weights and tokenizer belong together.
    model, tokenizer = load(tmp_path / "run/model", redeqx.Deployer(verbose=False))
    images = tmp_path / "images"
    images.mkdir()
    write_images(images, 12)
    train, _, _ = read_data(Args(data=images), model.config.encoder)
    assert train(0)[0][0].shape == (1, 2 * CELL, 2 * CELL)
    pictures = compose(digits()[2], 64, (1,))
    norm = read_norm(tmp_path / "run/model")
    batch = collate_fn(pictures, tokenizer=tokenizer, eos=EOS, n_tokens=7, norm=norm)
    loss = eqx.filter_jit(loss_fn)(eqx.nn.inference_mode(model), batch, jax.random.key(0))
    assert float(loss.total / loss.weight) < 0.6 * losses[0]


# --- pictures -------------------------------------------------------------------------------------------------------


def test_captions_describe_the_pictures():
    # Each class has one grey level, so classes and positions can be read from the pixels.
    examples = [(np.full((1, 8, 8), (i + 1) / 10, np.float32), i) for i in range(10)]
    pictures = compose(examples, 200, (0,))
    assert {caption.split()[2] for _, caption in pictures} == {"beside", "above"}
    for picture, caption in pictures:
        cells = picture.reshape(2, CELL, 2, CELL).max((1, 3))
        assert (picture > 0).sum() == 2 * 64
        filled = np.argwhere(cells)
        first, second = (NAMES[round(float(cells[tuple(at)]) * 10) - 1] for at in filled)
        relation = "beside" if filled[0][0] == filled[1][0] else "above"
        assert caption == f"{first} {relation} {second}"
        assert relation == "beside" or filled[0][1] == filled[1][1]  # never diagonal


def test_bend_distorts_half_of_the_digits():
    train = digits()[0]
    straight, bent = compose(train, 50, (0,)), compose(train, 50, (0,), bend=0.1)
    assert [caption for _, caption in straight] == [caption for _, caption in bent]
    a, b = (np.stack([image for image, _ in pictures]) for pictures in (straight, bent))
    is_bent = (a != b).any((1, 2, 3))
    assert 25 < is_bent.sum() < 50  # one digit in two, so three pictures in four
    assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.8
    assert float(compose(train[:1], 1, (0,))[0][0].sum()) == 2 * float(train[0][0].sum())


def test_epochs_differ_and_are_reproducible():
    train, validation, test = two_digits(50, 20, bend=0.1, seed=3)
    assert (len(train(0)), len(validation), len(test)) == (50, 20, 20)
    assert [caption for _, caption in train(0)] == [caption for _, caption in train(0)]
    assert [caption for _, caption in train(0)] != [caption for _, caption in train(1)]
    assert np.array_equal(train(1)[7][0], two_digits(50, 20, bend=0.1, seed=3)[0](1)[7][0])


# --- batches and scores ---------------------------------------------------------------------------------------------


def test_batch_has_token_labels_with_eos_and_pixels_around_zero():
    tokenizer = learn_tokenizer(["a three beside a seven"], 320)
    white = np.ones((1, 4, 4), np.float32)
    norm = read_norm(None)
    batch = collate_fn([(white, "a three"), (0 * white, "a")], tokenizer=tokenizer, eos=EOS, n_tokens=3, norm=norm)
    a, three = tokenizer.encode("a three", add_special_tokens=False).ids
    assert batch["labels"].tolist() == [[a, three, EOS], [a, EOS, -100]]
    assert batch["pixels"].min() == -1 and batch["pixels"].max() == 1
    cut = collate_fn([(white, "a three a three")], tokenizer=tokenizer, eos=EOS, n_tokens=2, norm=norm)
    assert cut["labels"].tolist() == [[a, three]]


def test_pixels_are_normalized_as_a_folder_says(tmp_path):
    tokenizer, image = learn_tokenizer(["a"], 320), np.random.default_rng(0).random((3, 4, 4), np.float32)
    for keys, mean, std in (
        ({"image_mean": [0.48, 0.45, 0.4], "image_std": [0.26, 0.25, 0.27]}, [0.48, 0.45, 0.4], [0.26, 0.25, 0.27]),
        ({"do_normalize": False, "image_mean": [0.5] * 3}, [0.0] * 3, [1.0] * 3),
        ({}, [0.5] * 3, [0.5] * 3),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(keys))
        batch = collate_fn([(image, "a")], tokenizer=tokenizer, eos=EOS, n_tokens=2, norm=read_norm(tmp_path))
        expected = (image - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
        np.testing.assert_allclose(batch["pixels"][0], expected, rtol=1e-5, atol=1e-6)


def test_scores_and_grid(tmp_path):
    image = np.zeros((1, 20, 20), np.float32)
    examples = [(image, "a three above a seven"), (image, "a one beside a two ")]
    captions = ["a three above a nine", "a one beside a two"]
    scores = score(examples, [np.array([i]) for i in range(2)], decode=lambda ids: captions[ids[0]])
    assert scores == {"exact": 0.5, "rougeL": pytest.approx((4 / 5 + 1) / 2)}
    draw(tmp_path / "one.png", examples, captions)
    pixels = np.asarray(Image.open(tmp_path / "one.png").convert("RGB")).astype(int)
    is_red = (pixels[..., 0] > 150) & (pixels[..., 1] < 80)
    is_green = (pixels[..., 1] > 120) & (pixels[..., 0] < 80)
    assert is_red.any() and is_green.any()
    assert np.argwhere(is_red)[:, 1].max() < np.argwhere(is_green)[:, 1].min()  # the wrong caption comes first
    draw(tmp_path / "right.png", examples, ["a three above a seven", "a one beside a two"])
    pixels = np.asarray(Image.open(tmp_path / "right.png").convert("RGB")).astype(int)
    assert not ((pixels[..., 0] > 150) & (pixels[..., 1] < 80)).any()


# --- wrong input ----------------------------------------------------------------------------------------------------


def test_folder_without_a_table_is_refused(tmp_path):
    (tmp_path / "images").mkdir()
    args = Args(data=tmp_path / "images", workdir=tmp_path / "work")
    assert_refused(args, tmp_path / "images/metadata.jsonl", "expected a line of `file_name` and `text`", "got 0 images")


def test_row_with_a_missing_file_is_refused(tmp_path):
    rows = write_images(tmp_path, 3)
    rows[1]["file_name"] = "gone.png"
    write_table(tmp_path, rows)
    args = Args(data=tmp_path, workdir=tmp_path / "work")
    assert_refused(args, tmp_path / "metadata.jsonl", "row 2: expected the file 'gone.png'", "got none")


def test_too_few_images_are_refused(tmp_path):
    write_images(tmp_path, 9)
    assert_refused(
        Args(data=tmp_path, workdir=tmp_path / "work"), tmp_path, "expected at least 10 images that differ, got 9"
    )


def test_folder_of_another_model_type_is_refused(tmp_path):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GPT2Config().to_hf()))
    args = Args(pretrained=folder, workdir=tmp_path / "work")
    assert_refused(args, folder / "config.json", "`model_type`: expected vision-encoder-decoder", "got 'gpt2'")


@pytest.mark.sweep
def test_incomplete_or_mismatched_captioner_is_refused(tmp_path):
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2}
    vit = ViTConfig(image_size=8, patch_size=4, d_ff=8, has_pooler=False, **sizes)
    gpt2 = GPT2Config(vocab_size=64, n_positions=8, has_cross_attention=True, **sizes)
    config = VisionEncoderDecoderConfig(vit, gpt2, bos_token_id=1, eos_token_id=2)
    shapes = eqx.filter_eval_shape(VisionEncoderDecoder, config, key=jax.random.key(0))
    zeros = lambda leaf: np.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf  # noqa: E731
    folder = save_pretrained(jax.tree.map(zeros, shapes), config, tmp_path / "model")
    args = Args(pretrained=folder, workdir=tmp_path / "work")
    assert_refused(args, folder / "config.json", "expected one `pad_token_id`, got None")
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, "pad_token_id": 0}))
    assert_refused(args, folder, "expected a tokenizer.json, got none")
    learn_tokenizer(["a"], 320).save(str(folder / "tokenizer.json"))
    assert_refused(args, folder / "tokenizer.json", "expected at most 64 ids, as in the model", "got 259")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    assert_refused(args, "`--pretrained`: expected a model of images [1, 20, 20] for pictures of digits, got [3, 8, 8]")
