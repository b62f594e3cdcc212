"""EAGLE-1, EAGLE-2 and EAGLE-3: heads that draft from the target's own hidden states."""
