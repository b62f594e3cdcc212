"""Early exit: the target's first layers draft, its last ones verify what they have begun.

LayerSkip (arXiv:2404.16710). Verification reuses the keys, values and exit states of the first E layers, so that a
verified block costs E + (L - E) layers and not E + L. Models trained for it draft best; the output is exact with any.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from ..core.checks import whole_number
from ..core.errors import InvalidCheckpoint, InvalidRequest
from ..core.target import Target
from ..core.views import layer_view, resumes_exactly
from .draft_tree import Tree
from .layer_choice import load_choice
from .view_draft import Resume, ViewDrafter

NAME = "early-exit"


class EarlyExit(ViewDrafter):
    """Drafts with the target's first blocks, its final norm and its LM head.

    Merged with another drafter it drafts as well, but all blocks verify: the states of the others' nodes are missing.

    Args:
        exit_layer: E, the number of blocks that draft; or the file that `draftwood search early-exit` wrote.
        gamma: most tokens in a chain, 8 when None; with a branching `tree` the number of levels.
        tree: `"chain"`; children of each context level by level, such as `(3, 2, 1)`; or `"dynamic"`, the best nodes by
            the draft's cumulative probability: deep where it is sure, wide where it is not.
        nodes: most nodes of a dynamic tree.
        width: contexts that a dynamic tree continues at each level, and children it tries in each.
        threshold: the draft goes no further behind a token for which its top probability was below this; 0 never
            stops early.
        adaptive: move a threshold above 0, row by row, so as to hold an acceptance of 0.9.

    Raises:
        InvalidRequest: an option that cannot work.
    """

    def __init__(
        self,
        *,
        exit_layer: int | str | Path,
        gamma: int | None = None,
        tree: Tree = "chain",
        nodes: int | None = None,
        width: int | None = None,
        threshold: float = 0.0,
        adaptive: bool = True,
    ) -> None:
        super().__init__(gamma=gamma, tree=tree, nodes=nodes, width=width, threshold=threshold, adaptive=adaptive)
        if not isinstance(exit_layer, (str, Path)):
            exit_layer = whole_number("exit_layer", exit_layer, hint=" (of blocks), or a file")
        self._exit_layer = exit_layer

    def bind(self, target: Target) -> None:
        """Builds the view, and finds out whether the target can go on from its exit.

        Raises:
            InvalidCheckpoint: the file is missing, broken, or for another model.
            InvalidRequest: the exit is not inside the model.
        """
        layer = self._exit_layer if isinstance(self._exit_layer, int) else _load(self._exit_layer, target)
        if not 1 <= layer < target.layers:
            raise InvalidRequest(f"exit_layer must be from 1 to {target.layers - 1} in this target, got {layer}")
        self.view = layer_view(target, 0, layer)
        self.resume = Resume(layer, layer_view(target, layer)) if resumes_exactly(target, layer) else None
        if self.resume is None:
            warnings.warn(
                f"{type(target.model).__name__} cannot be entered at block {layer} exactly (its embeddings are scaled "
                f"or given positions on the way in); the first {layer} blocks run again in every verification",
                stacklevel=2,
            )


def _load(path: str | Path, target: Target) -> int:
    layer = load_choice(path, target, NAME).get("exit_layer")
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise InvalidCheckpoint(f"{path}: 'exit_layer' must be a number of blocks, got {layer!r}")
    return layer
