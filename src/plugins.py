"""Which drafters and rules there are: the built-in ones, installed plugins, and what the caller adds.

The one module that names both drafters and rules. Built-ins are given as "module:attribute", so that building a
registry imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .core.drafter import Drafter
from .core.errors import DuplicateName, InvalidRequest
from .core.registry import PROJECT, Catalog, Registry, hookimpl
from .core.rule import Rule
from .drafters.merged import Merged


class BuiltIn:
    """The plugin that ships with the package; one line for each name.

    Args:
        registry: where a drafter that wraps another one by name finds it.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @hookimpl
    def register_drafters(self, registry: Catalog[Drafter]) -> None:
        """Adds the built-in drafters."""
        add, home = registry.add, "draftwood.drafters"
        add("none", f"{home}.none:NoDrafter", summary="drafts nothing: plain decoding, the baseline")
        add("prompt-lookup", f"{home}.prompt_lookup:PromptLookup", summary="what followed the last words before")
        add("draft-model", f"{home}.draft_model:DraftModel", summary="a smaller model of the same vocabulary")
        add("eagle", f"{home}.eagle.drafter:Eagle", summary="a head that drafts from the target's hidden states")
        add("eagle3", f"{home}.eagle.drafter:Eagle", summary="another name of eagle; the checkpoint tells which it is")
        add("medusa", f"{home}.medusa.drafter:Medusa", summary="trained heads that guess several tokens ahead")
        add("lookahead", f"{home}.lookahead:Lookahead", summary="n-grams from a window of parallel guesses")
        add("layer-skip", f"{home}.layer_skip:LayerSkip", summary="the target without some of its sub-layers")
        add("early-exit", f"{home}.early_exit:EarlyExit", summary="the target's first layers; the others verify")
        add("auto", self.auto, summary="another drafter, as deep and as wide as pays here; off where none does")
        add(
            "oracle",
            f"{home}.oracle:Oracle",
            summary="a recorded text, as right and as slow as it is told; for benchmarks",
        )

    def auto(self, *, of: str | Drafter = "prompt-lookup", seconds: float = 1.5, **options: Any) -> Drafter:
        """Wraps a drafter so that it drafts where that pays.

        Args:
            of: the drafter, by name or built.
            seconds: most time spent on measuring the target when it is bound; once a target.
            **options: those of the drafter named.
        """
        inner = self._registry.create_drafter(of, options) if isinstance(of, str) else of
        if options and not isinstance(of, str):
            raise InvalidRequest(f"options {options} go with a drafter's name; the drafter given is already built")
        return _tuned(lambda _: inner, seconds=seconds)

    @hookimpl
    def register_rules(self, registry: Catalog[Rule]) -> None:
        """Adds the built-in rules."""
        add, home = registry.add, "draftwood.verify"
        add("greedy", f"{home}.matching:Greedy", summary="accepts the target's most likely token")
        add("coupled", f"{home}.matching:Coupled", summary="sampling whose text no drafter can change")
        add("rejection", f"{home}.rejection:Rejection", summary="multi-round speculative sampling, root to leaf")
        add("traversal", f"{home}.traversal:Traversal", summary="speculative sampling, leaf to root")
        add("block", f"{home}.traversal:Traversal", summary="another name of traversal, used for chains")
        add("typical", f"{home}.typical:Typical", summary="Medusa's typical acceptance; lossy")


def load_registry(extras: Iterable[object] = ()) -> Registry:
    """Builds a registry anew: built-ins, then installed plugins by entry point, then `extras`.

    An installed plugin that fails is kept in `registry.broken` and quoted when a name is unknown, so that a
    broken package does not stop those who never ask for it.

    Args:
        extras: further plugins, modules or objects with hooks; one that fails raises its error.

    Raises:
        DuplicateName: two plugins claim one name.
    """
    registry = Registry()
    registry.merger, registry.tuner = Merged, _tuned
    registry.register(BuiltIn(registry), PROJECT)
    for entry_point in sorted(entry_points(group=PROJECT), key=_label):
        try:
            registry.register(entry_point.load(), _label(entry_point))
        except DuplicateName:
            raise
        except Exception as error:  # noqa: BLE001 (whatever a stranger's import can raise)
            registry.broken[_label(entry_point)] = f"{type(error).__name__}: {error}"
    for extra in extras:
        registry.register(extra, getattr(extra, "__name__", type(extra).__name__))
    return registry


def _tuned(make: Callable[[int], Drafter], **options: Any) -> Drafter:
    """Returns a wrap of what `make` makes of the longest draft there is; imported on use, as all built-ins are."""
    from .drafters.auto import LONGEST, Auto

    made = make(LONGEST)
    return made if isinstance(made, Auto) else Auto(of=made, **options)


def _label(entry_point: EntryPoint) -> str:
    """Returns what messages call a plugin: its name, and where it was installed from when that differs."""
    distribution = entry_point.dist.name if entry_point.dist else entry_point.name
    return entry_point.name if entry_point.name == distribution else f"{entry_point.name} ({distribution})"
