"""Reference models: plain Equinox modules, one family a file. They use redeqx; redeqx never imports them."""
