"""Image to text: a ViT encodes a picture, and a GPT-2 generates its caption by beam search.

    python -m examples.image_to_text

The default data are pictures of two of scikit-learn's handwritten digits, with captions like "a three beside a seven".
Training pictures are composed anew in each epoch. Validation and test pictures use digits that no training picture contains.
`--data FOLDER` takes images and a `metadata.jsonl` whose lines have `file_name` and `text`. `--pretrained FOLDER` continues
from a captioner of `transformers` (ViT and GPT-2) with its `tokenizer.json`, and normalizes pixels as its
`preprocessor_config.json` says.

1 CPU core, 241 s of CPU time: 96.2 % of the test captions match exactly, both digits and their relation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer

import redeqx
from examples._cli import Flags
from examples._images import Captioned, Norm, read_captions, read_norm
from examples._texts import BOS, EOS, PAD, embedding_rows, learn_tokenizer, load_tokenizer
from examples.image_to_text.pictures import CELL, Parts, draw, two_digits
from redeqx.models import cross_entropy, generate, save_pretrained
from redeqx.models.gpt2 import GPT2Config
from redeqx.models.vision_encoder_decoder import VisionEncoderDecoder, VisionEncoderDecoderConfig
from redeqx.models.vit import ViTConfig
from redeqx.optimizers import decay_mask


@dataclass(frozen=True)
class Args(Flags):
    data: Path | None = None  # A folder of images with metadata.jsonl. Pictures of two digits by default.
    pretrained: Path | None = None  # A Hugging Face folder of a captioner to start from. It determines the model's sizes.
    workdir: Path = Path("workdir/image_to_text")  # For metrics, checkpoints and pictures. A run resumes from it.
    n_train: int = 8000  # Pictures of two digits in an epoch, new ones each time.
    n_held_out: int = 1000  # Validation pictures of two digits, and as many test pictures.
    bend: float = 0.15  # Strength of the distortion (rotation, scale, shear) of half of the training digits.
    image_size: int = 60  # Height and width to which the images of `--data` are resized, in pixels.
    patch_size: int = 10  # Pixels. A patch of the default data contains at most one digit.
    d_model: int = 96
    n_heads: int = 4
    n_encoder_layers: int = 3
    n_decoder_layers: int = 1
    dropout: float = 0.1
    n_ids: int = 512  # Maximum number of ids of the byte-level BPE that is trained on the captions.
    max_tokens: int = 64  # Maximum length of a caption, including its end. Longer ones are truncated.
    n_beams: int = 3
    n_epochs: int = 40
    batch_size: int = 64  # Examples of one update, on all devices together.
    learning_rate: float = 2e-3
    weight_decay: float = 0.05


def read_data(args: Args, encoder: ViTConfig | None) -> Parts:
    """Returns the training, validation and test data, at the encoder's image size if an encoder is given."""
    if args.data is not None:
        size, n_channels = (args.image_size, 3) if encoder is None else (encoder.image_size, encoder.n_channels)
        train, validation, test = read_captions(args.data, size, n_channels)
        return lambda _: train, validation, test
    if encoder is not None and (encoder.n_channels, encoder.image_size) != (1, 2 * CELL):
        raise ValueError(
            f"`--pretrained`: expected a model of images [1, {2 * CELL}, {2 * CELL}] for pictures of digits, got "
            f"[{encoder.n_channels}, {encoder.image_size}, {encoder.image_size}]. Pass your own images by `--data`."
        )
    return two_digits(args.n_train, args.n_held_out, bend=args.bend, seed=args.seed)


def collate_fn(examples: Captioned, *, tokenizer: Tokenizer, eos: int, n_tokens: int, norm: Norm) -> dict[str, np.ndarray]:
    """Returns normalized pixels, and the tokens of captions with an end token, padded with -100."""
    labels = np.full((len(examples), n_tokens), -100, np.int32)
    for row, (_, caption) in zip(labels, examples, strict=True):
        ids = [*tokenizer.encode(caption, add_special_tokens=False).ids, eos][:n_tokens]
        row[: len(ids)] = ids
    mean, std = norm
    return {"pixels": (np.stack([image for image, _ in examples]) - mean) / std, "labels": labels}


def loss_fn(model: VisionEncoderDecoder, batch: dict[str, jax.Array], key: jax.Array) -> redeqx.Loss:
    """Returns the loss in nats, summed over tokens."""
    keys = jax.random.split(key, len(batch["labels"]))
    decoder_ids = jax.vmap(model.shift_right)(batch["labels"])
    logits = jax.vmap(lambda pixels, ids, key: model(pixels, ids, key=key))(batch["pixels"], decoder_ids, keys)
    return cross_entropy(logits, batch["labels"])


def pred_fn(model: VisionEncoderDecoder, batch: dict[str, jax.Array], key: jax.Array, *, n_beams: int) -> jax.Array:
    """Returns the tokens of generated captions, at most as many as the labels have."""
    del key
    return generate(model, batch["pixels"], max_new_tokens=batch["labels"].shape[1], num_beams=n_beams)


def score(examples: Captioned, outputs: Sequence[np.ndarray], *, decode: Callable[[np.ndarray], str]) -> dict[str, float]:
    """Returns the share of captions that match exactly, and the mean F1 of ROUGE-L, which is 1 for those."""
    rouge = RougeScorer(["rougeL"])
    pairs = [(text.strip(), decode(ids)) for (_, text), ids in zip(examples, outputs, strict=True)]
    return {
        "exact": float(np.mean([text == caption for text, caption in pairs])),
        "rougeL": float(np.mean([rouge.score(text, caption)["rougeL"].fmeasure for text, caption in pairs])),
    }


def load(folder: Path, deployer: redeqx.Deployer) -> tuple[VisionEncoderDecoder, Tokenizer]:
    """Returns the captioner and the tokenizer of a Hugging Face folder."""
    model, config = VisionEncoderDecoder.from_pretrained(folder, deployer=deployer)
    for name in ("eos_token_id", "pad_token_id"):
        if not isinstance(token := getattr(config, name), int):
            raise ValueError(f"`{folder / 'config.json'}`: expected one `{name}`, got {token}. Set it there.")
    return model, load_tokenizer(folder, config.decoder.vocab_size)


def make(args: Args, examples: Captioned, deployer: redeqx.Deployer) -> tuple[VisionEncoderDecoder, Tokenizer]:
    """Returns a new captioner for these images, and a tokenizer trained on their captions."""
    tokenizer = learn_tokenizer([caption for _, caption in examples], args.n_ids)
    n_channels, image_size, _ = examples[0][0].shape
    # The published 0.02 is for a width of 768; narrower models learn faster with larger weights.
    std = 0.02 * (768 / args.d_model) ** 0.5
    encoder = ViTConfig(
        image_size, args.patch_size, n_channels, args.d_model, 4 * args.d_model, args.n_encoder_layers, args.n_heads,
        dropout=args.dropout, has_pooler=False, init_std=std,
    )  # fmt: skip
    decoder = GPT2Config(
        embedding_rows(tokenizer.get_vocab_size()), args.max_tokens + 1, args.d_model, args.n_decoder_layers, args.n_heads,
        embedding_dropout=args.dropout, attention_dropout=args.dropout, residual_dropout=args.dropout,
        has_cross_attention=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, init_std=std,
    )  # fmt: skip
    config = VisionEncoderDecoderConfig(encoder, decoder, BOS, EOS, PAD, decoder_start_token_id=BOS)
    key = deployer.next_key()

    def init() -> VisionEncoderDecoder:
        model = VisionEncoderDecoder(config, key=key)
        # A patch embedding sums over pixels and is far larger than an initial position, so attention by position would be
        # learned late.
        positions = model.encoder.positions * args.patch_size * n_channels**0.5
        return eqx.tree_at(lambda model: model.encoder.positions, model, positions)

    return deployer.init(init), tokenizer


def main(args: Args) -> dict[str, float]:
    """Trains and tests. Returns the test scores."""
    deployer = redeqx.Deployer(args.seed, args.n_model_shards, args.n_fsdp_shards, workdir=args.workdir)
    if args.pretrained is None:
        train, validation, test = read_data(args, None)
        model, tokenizer = make(args, train(0), deployer)
    else:
        model, tokenizer = load(args.pretrained, deployer)
        train, validation, test = read_data(args, model.config.encoder)
    eos = model.config.eos_token_id
    assert isinstance(eos, int)  # checked in `load`
    first = train(0)
    longest = 1 + max(len(tokenizer.encode(caption, add_special_tokens=False)) for _, caption in first)
    n_tokens = min(args.max_tokens, longest, model.config.n_positions - 1)
    lr = deployer.get_lr_schedule_fn(
        len(first), batch_size=args.batch_size, n_epochs=args.n_epochs, learning_rate=args.learning_rate,
        schedule_type="cosine", warmup_ratio=0.05,
    )  # fmt: skip
    adamw = optax.adamw(lr, b2=0.98, weight_decay=args.weight_decay, mask=decay_mask)
    collate = partial(collate_fn, tokenizer=tokenizer, eos=eos, n_tokens=n_tokens, norm=read_norm(args.pretrained))
    batch = collate([first[i] for i in range(min(args.batch_size, len(first)))])
    deployer.log_info(deployer.plan(model, loss_fn, batch).explain(), title="plan")
    trainer = redeqx.Trainer(
        deployer, model=model, optimizer=optax.chain(optax.clip_by_global_norm(1.0), adamw), loss_fn=loss_fn,
        collate_fn=collate, lr_schedule_fn=lr,
    )  # fmt: skip

    def decode(ids: np.ndarray) -> str:
        return tokenizer.decode(ids.tolist()).strip()  # drops special tokens

    predictor = trainer.get_default_predictor(partial(pred_fn, n_beams=args.n_beams))
    trainer.fit(
        train, batch_size=args.batch_size, n_epochs=args.n_epochs, eval_examples=validation, eval_predictor=predictor,
        eval_metric_fn=partial(score, decode=decode), save_last_ckpt=True, save_argmax_ckpt_by_metrics=["exact"],
    )  # fmt: skip

    trainer.load_ckpt("argmax_exact")
    outputs = predictor.predict(test, batch_size=args.batch_size)
    scores = {f"test_{name}": value for name, value in score(test, outputs, decode=decode).items()}
    draw(args.workdir / "captions.png", test, [decode(ids) for ids in outputs])
    folder = save_pretrained(trainer.model, model.config, args.workdir / "model")
    if args.pretrained is None:  # a loaded model's tokenizer files are saved with it
        tokenizer.save(str(folder / "tokenizer.json"))

    table = "\n".join(f"{name:12}{value:.4f}" for name, value in scores.items())
    deployer.log_info(table, title=f"{len(test)} images that training has not seen")
    deployer.log_metrics(scores, trainer.step)
    files = [args.workdir / "captions.png", folder, args.workdir / "ckpts"]
    deployer.log_info("\n".join(map(str, files)), title="captions, best model as a Hugging Face folder, checkpoints")
    return scores
