"""Layer skipping: the target without some of its attention and MLP sub-layers drafts for itself.

Draft & Verify (arXiv:2309.08168). Which sub-layers can be spared is found by `draftwood.training.layer_search`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ..core.errors import InvalidRequest
from ..core.target import Target
from ..core.views import layer_view
from .draft_tree import Tree
from .layer_choice import load_choice
from .view_draft import START_THRESHOLD, ViewDrafter

NAME = "layer-skip"
_KINDS = ("attention", "mlp")


class LayerSkip(ViewDrafter):
    """Drafts with the target itself, some sub-layers skipped.

    Args:
        skip: the file that `draftwood search layer-skip` wrote, or `{"attention": [...], "mlp": [...]}` with the blocks
            whose sub-layers are skipped, counted from 0.
        gamma: most tokens in a chain, 8 when None; with a branching `tree` the number of levels.
        tree: `"chain"`; children of each context level by level, such as `(3, 2, 1)`; or `"dynamic"`, the best nodes by
            the draft's cumulative probability: deep where it is sure, wide where it is not.
        nodes: most nodes of a dynamic tree.
        width: contexts that a dynamic tree continues at each level, and children it tries in each.
        threshold: the draft goes no further behind a token for which its top probability was below this; 0 never
            stops early. None takes 0.8 for a chain, 0 for a tree.
        adaptive: move a threshold above 0, row by row, so as to hold an acceptance of 0.9.

    Raises:
        InvalidRequest: an option that cannot work.
    """

    def __init__(
        self,
        *,
        skip: str | Path | Mapping[str, Sequence[int]],
        gamma: int | None = None,
        tree: Tree = "chain",
        nodes: int | None = None,
        width: int | None = None,
        threshold: float | None = None,
        adaptive: bool = True,
    ) -> None:
        if threshold is None:
            threshold = START_THRESHOLD if tree == "chain" else 0.0
        super().__init__(gamma=gamma, tree=tree, nodes=nodes, width=width, threshold=threshold, adaptive=adaptive)
        if not isinstance(skip, (str, Path)):
            _check(skip, "skip")
        self._skip = skip

    def bind(self, target: Target) -> None:
        """Builds the view.

        Raises:
            InvalidCheckpoint: the file is missing, broken, or for another model.
            InvalidRequest: blocks that the target does not have, or nothing is left to run.
            UnsupportedModel: a sub-layer cannot be taken out of this model's blocks.
        """
        skip = self._skip
        if isinstance(skip, (str, Path)):
            options = load_choice(skip, target, NAME)
            _check(options, str(skip))
            skip = options
        self.view = layer_view(target, skip_attention=skip.get("attention", ()), skip_mlp=skip.get("mlp", ()))


def _check(skip: Mapping[str, Sequence[int]], where: str) -> None:
    wanted = 'it must be like {"attention": [3, 8], "mlp": [8]}'
    if not isinstance(skip, Mapping) or not set(skip) <= set(_KINDS):
        raise InvalidRequest(f"{where}: {wanted}, got {skip!r}")
    for kind, blocks in skip.items():
        listed = isinstance(blocks, Collection) and not isinstance(blocks, (str, bytes))
        if not listed or not all(isinstance(block, int) and not isinstance(block, bool) for block in blocks):
            raise InvalidRequest(f"{where}: {kind!r} must be a list of block numbers, got {blocks!r}")
    if not any(skip.values()):
        raise InvalidRequest(f"{where} skips nothing, so that a draft would cost as much as the target; {wanted}")
