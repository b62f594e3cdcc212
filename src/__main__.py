"""`python -m draftwood`, the form that launchers take: `accelerate launch -m draftwood compare ...`."""

from .cli import main

if __name__ == "__main__":
    main()
