"""Draftwood beside what people would use instead: the same model, prompts, precision, threads and token counter.

Every library runs in a process of its own, in its own virtual environment where versions clash, and answers one prompt
at a time, so that all of them take turns on each prompt.
"""
