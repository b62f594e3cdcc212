"""What the docs claim, measured. `make bench` runs all of it; each module also runs by itself."""
