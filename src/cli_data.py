"""What the commands that train share: where their data is, and reading it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .cli_common import remark
from .core.errors import InvalidRequest
from .core.target import Target

Data = Annotated[
    str,
    typer.Option(
        help="A .jsonl or .parquet file of `text` or `messages`, of which the assistant's are learnt; plain text, "
        "documents separated by empty lines; or `dataset:NAME,split=train`, with options of `load_dataset`."
    ),
]
LimitTokens = Annotated[int | None, typer.Option(help="Most tokens to read; a data set is then streamed.")]


def read_sequences(source: str, target: Target, length: int, limit_tokens: int | None = None) -> Any:
    """Reads and packs training data, and says on stderr how much there is and what is left out.

    Returns:
        `draftwood.training.data.Sequences`, which is not imported before a command needs it.

    Raises:
        InvalidRequest: it cannot be read, or the target has no tokenizer.
    """
    from .training.data import pack, stream_documents

    if target.tokenizer is None:
        raise InvalidRequest("the target has no tokenizer, which training data needs")
    skipped: list[InvalidRequest] = []
    documents = stream_documents(source, target.tokenizer, limit_tokens=limit_tokens, on_skip=skipped.append)
    sequences = pack(documents, length)
    cut = f"; {sequences.cut} tokens left out, around which nothing is learnt" if sequences.cut else ""
    remark(f"{len(sequences)} sequences of {length} tokens{cut}")
    if skipped:
        remark(f"{len(skipped)} rows left out, the first: {skipped[0]}")
    return sequences
