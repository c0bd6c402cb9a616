"""The text-to-image example at a small size: both stages learn, a pipeline round-trips, and bad input is refused."""

import json
import os
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import redeqx
from examples._images import digits
from examples._texts import learn_tokenizer
from examples.text_to_image.captioned import captioned_digits, whole_batches
from examples.text_to_image.main import Args, loss_fn, main, vae_loss_fn
from examples.text_to_image.pipeline import Pipeline, check_padding, encode_captions, without_words
from redeqx.models import save_pretrained
from redeqx.models.clip import CLIPText, CLIPTextConfig
from redeqx.models.schedulers import DDIM
from redeqx.models.vae import VAE, Posterior, VAEConfig
from tests.examples._run import run_example

TIMEOUT = 270  # seconds
IDS = np.array([[1, 7, 8, 2, 2], [1, 9, 2, 2, 2]], np.int32)
SCHEDULE = DDIM(
    beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", clip_range=None, timestep_spacing="trailing"
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of captioned images that differ: squares, dark or bright."""
    folder = tmp_path_factory.mktemp("images")
    lines = []
    for i in range(20):
        Image.new("L", (12, 12), (40 + i, 220 - i)[i % 2]).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "text": ("dark", "light")[i % 2]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


class RandomInitializer:
    """Replaces a deployer: fills models with random numbers, without compiling."""

    def next_key(self):
        return jax.random.key(0)

    def init(self, make_model):
        rng = np.random.default_rng(0)
        shapes = eqx.filter_eval_shape(make_model)
        is_shape = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
        return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if is_shape(x) else x, shapes)


def save_untrained(folder, n_channels):
    config = VAEConfig(n_channels, n_channels, 4, (8,), norm_groups=8, scaling_factor=0.5)
    vae = RandomInitializer().init(lambda: VAE(config, key=jax.random.key(0)))
    text = CLIPTextConfig(300, 8, 16, 32, 1, 2, bos_token_id=1, eos_token_id=2)
    pipeline = Pipeline.make(vae, text, (8,), 8, RandomInitializer())
    pipeline.save(folder, learn_tokenizer(["dark", "light"], 300))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of an untrained pipeline."""
    return save_untrained(tmp_path_factory.mktemp("saved") / "pipeline", 1)


@pytest.fixture(scope="module")
def fast_compilation():
    """Disables XLA's optimizations in subprocesses, whose time goes to compilation: they take half as long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, fast_compilation):
    workdir = tmp_path_factory.mktemp("text_to_image")
    flags = ["--vae-channels", 8, "--unet-channels", 8, "--text-size", 16, "--n-vae-epochs", 1, "--n-epochs", 1]
    more = ["--batch-size", 64, "--n-denoising-steps", 5, "--n-samples", 2, "--learning-rate", 4e-3]
    return workdir, run_example("text_to_image", *flags, *more, workdir=workdir, timeout=TIMEOUT)


@pytest.mark.sweep
def test_both_stages_learn_from_the_digits(trained):
    workdir, outcome = trained
    lines = [json.loads(line) for line in (workdir / "vae/metrics.jsonl").read_text("utf-8").splitlines()]
    errors = [line["loss"] for line in lines if "loss" in line]
    assert np.mean(errors[-5:]) < 0.4 * errors[0]
    losses = outcome.series("loss")
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:3])
    scores = outcome.metrics[-1]
    assert scores["test_loss"] < 0.9 * np.mean(losses[:3]) and scores["test_judge_accuracy"] > 0.97
    assert 0 <= scores["test_agreement"] <= 1 and scores["test_distance"] > 0
    best = json.loads((workdir / "ckpts/index.json").read_text("utf-8"))["argmin_loss"]
    assert (workdir / "ckpts" / best / "model.safetensors").is_file() and best in outcome.output
    with Image.open(workdir / "samples.png") as image:
        assert image.width > 500
    # The latents are scaled to unit variance; the config records the factor.
    assert json.loads((workdir / "pipeline/vae/config.json").read_text("utf-8"))["scaling_factor"] not in (1.0, 0.18215)


@pytest.mark.sweep
def test_saved_pipeline_is_trained_further_on_a_folder_of_images(trained, images, tmp_path, fast_compilation):
    before = trained[0] / "pipeline"
    flags = ["--pretrained", before, "--data", images, "--image-size", 8, "--batch-size", 2, "--n-epochs", 1]
    more = ["--n-denoising-steps", 2, "--n-samples", 2, "--workdir", tmp_path]  # on one device
    outcome = run_example("text_to_image", *flags, *more, timeout=TIMEOUT)
    assert outcome.status == 0, outcome.output
    scores = json.loads((tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert np.isfinite(scores["test_loss"]) and "test_agreement" not in scores
    assert (tmp_path / "samples.png").is_file() and not (tmp_path / "vae").exists()
    deployer = redeqx.Deployer(verbose=False)
    (old, tokenizer), (new, again) = (Pipeline.load(folder, deployer) for folder in (before, tmp_path / "pipeline"))
    assert tokenizer.get_vocab() == again.get_vocab() and old.schedule == new.schedule == SCHEDULE
    assert jax.tree.structure(old) == jax.tree.structure(new)

    def is_changed(part):
        leaves = (jax.tree.leaves(eqx.filter(part(of), eqx.is_array)) for of in (old, new))
        return any(not np.array_equal(a, b) for a, b in zip(*leaves, strict=True))

    assert is_changed(lambda of: of.unet.conv_in) and is_changed(lambda of: of.text_encoder.embedding)
    assert not is_changed(lambda of: of.vae)


@pytest.mark.sweep
def test_pipeline_round_trips_through_its_folder(saved, tmp_path):
    pipeline, tokenizer = Pipeline.load(saved, redeqx.Deployer(verbose=False))
    assert pipeline.vae.config.scaling_factor == 0.5 and pipeline.schedule == SCHEDULE
    pipeline.save(tmp_path, tokenizer)
    for file in saved.rglob("*"):
        copy = tmp_path / file.relative_to(saved)
        if file.suffix == ".json":
            assert json.loads(file.read_text("utf-8")) == json.loads(copy.read_text("utf-8")), file
        else:
            assert file.is_dir() or file.read_bytes() == copy.read_bytes(), file


# --- sampling and losses, against formulas ----------------------------------------------------------------------------


def test_guidance_scales_the_difference_from_the_empty_caption():
    """The UNet predicts latents equal to the mean of its caption's ids, so guidance has a known result."""

    def unet(x, timestep, states):
        kept = jnp.asarray(SCHEDULE.alphas)[timestep]
        return (jnp.sqrt(kept) * x - states.mean()) / jnp.sqrt(1 - kept)

    pipeline = Pipeline(None, lambda ids: ids.astype(jnp.float32)[:, None], unet, SCHEDULE)
    noise = jax.random.normal(jax.random.key(0), (2, 1, 2, 2))
    latents = pipeline.denoise(noise, jnp.asarray(IDS), guidance=3.0, n_steps=5)
    own, nothing = IDS.mean(1), np.array([[1, 2, 2, 2, 2]]).mean()
    wanted = np.broadcast_to((nothing + 3 * (own - nothing))[:, None, None, None], noise.shape)
    np.testing.assert_allclose(latents, wanted, rtol=1e-4)


def test_latents_are_decoded_as_the_autoencoder_made_them():
    config = VAEConfig(scaling_factor=0.5, shift_factor=0.2)
    vae = SimpleNamespace(config=config, decode=lambda latents: latents[:3])
    image = jnp.linspace(-1, 1, 24).reshape(1, 3, 2, 4)
    images = Pipeline(vae, None, None, SCHEDULE).decode(config.to_diffusion(image))
    np.testing.assert_allclose(images, image, rtol=0, atol=1e-6)


class Oracle:
    """Replaces a pipeline: predicts from known clean latents, and keeps the captions that it receives."""

    schedule = SCHEDULE

    def __init__(self, latents):
        self.latents = latents

    def predict(self, noisy, timesteps, ids):
        kept = jnp.asarray(SCHEDULE.alphas)[timesteps][:, None, None, None]
        self.timesteps, self.ids = timesteps, np.asarray(ids)
        return (jnp.sqrt(kept) * noisy - self.latents) / jnp.sqrt(1 - kept)


@pytest.mark.parametrize("dropout", [0.0, 1.0])
def test_loss_is_zero_for_the_true_clean_latents(dropout):
    latents = jax.random.normal(jax.random.key(1), (2, 1, 2, 2))
    batch = {"latents": latents, "ids": jnp.asarray(IDS)}
    right, wrong = Oracle(latents), Oracle(latents + 1)
    assert float(loss_fn(right, batch, jax.random.key(2), caption_dropout=dropout)) < 1e-5
    assert float(loss_fn(wrong, batch, jax.random.key(2), caption_dropout=dropout)) > 0.1
    assert np.array_equal(right.ids, [[1, 2, 2, 2, 2]] * 2 if dropout else IDS)
    assert right.timesteps[0] != right.timesteps[1]


def test_autoencoder_loss_is_squared_error_plus_divergence():
    class Halves:
        """Latents of mean 0.5 and almost no variance; every picture is black."""

        def encode(self, image):
            return Posterior(jnp.full((1, 2, 2), 0.5), jnp.full((1, 2, 2), -10.0))

        def decode(self, latents):
            return jnp.zeros((1, 2, 2))

    batch = {"images": np.full((3, 1, 2, 2), 0.5, np.float32)}
    divergence = 4 * (0.5**2 + np.exp(-10) - 1 + 10) / 2
    loss = vae_loss_fn(Halves(), batch, jax.random.key(0), kl_weight=0.1)
    np.testing.assert_allclose(loss, 0.5**2 + 0.1 * divergence / 4, rtol=1e-6)


def test_digits_have_every_phrase():
    train, validation, test = captioned_digits()
    assert [len(part) for part in (train, validation, test)] == [5028, 720, 1440]
    first = digits()[0][0][1]
    assert {caption.split()[-1] for _, caption in train[:4]} == {
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")[first]
    }
    assert whole_batches(list("abcde"), 4) == list("abcdeabc") and whole_batches(list("abcd"), 4) == list("abcd")


@pytest.mark.sweep
def test_text_encoder_has_all_ids_of_a_small_tokenizer(tmp_path):
    vae = RandomInitializer().init(lambda: VAE(VAEConfig(1, 1, 4, (8,), norm_groups=8), key=jax.random.key(0)))
    part = [(np.full((1, 8, 8), i / 8, np.float32), "the digit one") for i in range(8)]
    with (
        mock.patch("examples.text_to_image.main.captioned_digits", return_value=(part, part, part)),
        mock.patch("examples.text_to_image.main.train_vae", return_value=vae),
        mock.patch.object(Pipeline, "make", side_effect=InterruptedError) as make,
        pytest.raises(InterruptedError),
    ):
        main(Args(workdir=tmp_path, vocab_size=100, max_tokens=24, batch_size=8))
    assert make.call_args.args[1].vocab_size == 259  # all bytes, and three special tokens


def test_captions_are_padded_with_the_end_token():
    tokenizer = learn_tokenizer(["a three", "the digit three"], 300)
    ids = encode_captions(tokenizer, ["a three", ""], 8)
    assert ids.shape == (2, 8) and ids[1].tolist() == [1, *[2] * 7]
    assert tokenizer.decode(ids[0].tolist()) == "a three"
    assert np.array_equal(without_words(jnp.asarray(ids)), [ids[1], ids[1]])
    with pytest.raises(ValueError, match=r"`xyzxyzxyz`: expected a caption of at most 8 tokens, got 11\..*--max-tokens"):
        encode_captions(tokenizer, ["a three", "xyzxyzxyz"], 8)


def test_another_padding_is_refused(tmp_path):
    """As that of Stable Diffusion 2, whose text encoder was trained with it."""
    tokenizer, path = learn_tokenizer(["a three"], 300), tmp_path / "tokenizer_config.json"
    check_padding(path, tokenizer)  # a folder that the example wrote
    for pad in ("</s>", {"content": "</s>"}, None):
        path.write_text(json.dumps({"pad_token": pad}), "utf-8")
        check_padding(path, tokenizer)
    path.write_text(json.dumps({"pad_token": "!"}), "utf-8")
    with pytest.raises(
        ValueError, match=rf"`{re.escape(str(path))}`: `pad_token`: expected '</s>', .*, got '!'\. Pass a pipe"
    ):
        check_padding(path, tokenizer)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_folders_without_images_are_refused(tmp_path, images):
    with pytest.raises(ValueError, match=rf"`{re.escape(str(tmp_path))}/metadata.jsonl`: expected a line .* got 0 images"):
        main(Args(data=tmp_path, workdir=tmp_path / "run"))
    lines = (images / "metadata.jsonl").read_text("utf-8").splitlines()
    (tmp_path / "metadata.jsonl").write_text(lines[0] + "\n", "utf-8")
    with pytest.raises(ValueError, match=r"row 1: expected the file '0.png' next to it, got none"):
        main(Args(data=tmp_path, workdir=tmp_path / "run"))
    shutil.copy(images / "0.png", tmp_path)
    with pytest.raises(ValueError, match=rf"`{re.escape(str(tmp_path))}`: expected at least 10 images that differ, got 1\."):
        main(Args(data=tmp_path, workdir=tmp_path / "run"))


@pytest.mark.sweep
def test_folders_without_a_pipeline_are_refused(saved, tmp_path):
    def refused(change, message):
        folder = tmp_path / "pipeline"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)
        change(folder)
        with pytest.raises(ValueError, match=message.replace("FOLDER", re.escape(str(folder)))):
            main(Args(pretrained=folder, workdir=tmp_path / "run"))

    def swap(folder):
        shutil.rmtree(folder / "unet")
        shutil.copytree(folder / "vae", folder / "unet")

    def widen(folder):
        config = CLIPTextConfig(300, 8, 32, 32, 1, 2, bos_token_id=1, eos_token_id=2)
        save_pretrained(
            RandomInitializer().init(lambda: CLIPText(config, key=jax.random.key(0))), config, folder / "text_encoder"
        )

    def rewrite(part, **fields):
        def change(folder):
            path = folder / part / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), "utf-8")

        return change

    refused(lambda folder: shutil.rmtree(folder / "unet"), r"`FOLDER/unet`: expected a part .*, got scheduler, text_encoder")
    refused(swap, r"`FOLDER/unet`: expected a UNet, got a VAE")
    refused(rewrite("text_encoder", model_type="gpt3"), r"`FOLDER/text_encoder/config.json`: `model_type`: .* got 'gpt3'")
    refused(lambda folder: (folder / "tokenizer/tokenizer.json").unlink(), r"`FOLDER/tokenizer`: expected a tokenizer.json")
    scheduler = "scheduler/scheduler_config.json"
    refused(lambda folder: (folder / scheduler).unlink(), rf"`FOLDER/{scheduler}`: expected a file, got an empty folder")
    message = r"`FOLDER/unet/config.json`: `cross_attention_dim`: expected 32, as in the other parts, got 16"
    refused(widen, message)


@pytest.mark.sweep
def test_colour_pipeline_is_refused_for_digits(tmp_path):
    folder = save_untrained(tmp_path / "pipeline", 3)
    with pytest.raises(ValueError, match=rf"`{re.escape(str(folder))}/vae`: expected `in_channels` 1, .* got 3"):
        main(Args(pretrained=folder, workdir=tmp_path / "run"))
