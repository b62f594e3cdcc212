"""Training heads and finding layers: what is made for one target, ahead of decoding with it."""
