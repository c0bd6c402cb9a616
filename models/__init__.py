"""Reference models: plain Equinox modules, one family a file. They use redeqx; redeqx never imports them."""

from ._folder import save_pretrained as save_pretrained
from ._pretrained import from_pretrained as from_pretrained
