"""Reference models: plain Equinox modules, one family a file. They use redeqx; redeqx never imports them."""

from ._folder import save_pretrained as save_pretrained
from ._generate import generate as generate
from ._losses import cross_entropy as cross_entropy
from ._pretrained import from_pretrained as from_pretrained
