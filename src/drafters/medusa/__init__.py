"""Medusa: extra heads on the target's last hidden state, each of which guesses one token further ahead."""
