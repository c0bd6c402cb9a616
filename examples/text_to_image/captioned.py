"""Captions of digits, and batches that are full."""

from examples._images import Captioned, digits

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PHRASES = ("{}", "the digit {}", "a handwritten {}", "the number {}")


def captioned_digits() -> tuple[Captioned, Captioned, Captioned]:
    """Returns the digits for training, validation and testing, each with every caption template."""
    train, validation, test = (
        [(image, phrase.format(WORDS[label])) for image, label in part for phrase in PHRASES] for part in digits()
    )
    return train, validation, test


def whole_batches(examples: Captioned, batch_size: int) -> Captioned:
    """Repeats some examples so that the last batch is full. A smaller one would be compiled separately."""
    return [examples[i % len(examples)] for i in range(-(-len(examples) // batch_size) * batch_size)]
